"""Handlers of the kinds of objects in a state tree."""
