"""Checkpoints of DeepSpeed ZeRO."""
