"""Converts plain data to JSON values, and back."""
