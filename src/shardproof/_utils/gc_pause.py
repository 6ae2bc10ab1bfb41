"""Pausing Python's garbage collector around code that makes many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_garbage_collection"]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A large state makes several small objects a tensor; looking for garbage among them triples the time.

    Reference counting goes on, so only cycles that other threads drop meanwhile wait for its end.

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
