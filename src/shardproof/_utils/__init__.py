"""Small helpers without knowledge of checkpoints. Import each module by its own name."""
