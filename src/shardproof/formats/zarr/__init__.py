"""Zarr arrays and groups."""
