"""The steps of a training run, and work on stored checkpoints."""
