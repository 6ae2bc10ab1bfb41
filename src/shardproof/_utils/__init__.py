"""Small helpers that do not depend on checkpoints. Import each module by its own name."""
