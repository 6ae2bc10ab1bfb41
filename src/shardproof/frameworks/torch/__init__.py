"""Parts of the adapter of ``torch.distributed.checkpoint``."""
