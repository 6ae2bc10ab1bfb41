"""Parts of a training stack whose state is hard to save: layouts, optimizers, sharding, reruns."""
