"""Safetensors files, of one file or with an index."""
