"""Checkpoints of TorchSnapshot."""
