"""Small helpers that know nothing of checkpoints. Each module is imported by its own name."""
