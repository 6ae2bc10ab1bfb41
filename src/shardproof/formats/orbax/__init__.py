"""Checkpoints of Orbax, and OCDBT, the key-value store inside."""
