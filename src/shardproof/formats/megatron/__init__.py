"""Checkpoints of Megatron: legacy, distributed and Zarr."""
