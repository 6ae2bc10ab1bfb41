"""Pauses Python's garbage collector around code that makes many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_garbage_collection"]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns the collector off until the context ends.

    A large state makes several small objects a tensor, and the search for garbage among them triples the
    time. Reference counting goes on: only cycles that other threads drop meanwhile wait for the end.

    >>> with no_garbage_collection():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
