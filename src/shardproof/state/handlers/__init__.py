"""Handlers of the kinds of objects that a state tree may have."""
