"""Locks that are free in a child made by `os.fork`.

A child has one thread: the one that forked. If another thread held a lock at that moment, the child never
releases it. So this module makes all locks that outlive a call, and frees them in every child. The state that
they guard is whole, because single steps of the interpreter replace or change it.

The fork renews nothing else. The child knows threads, saves and connections of its parent by the process
number, and makes its own when it needs them.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

__all__ = ["lock"]

_locks: WeakSet[threading.Lock] = WeakSet()


def lock() -> threading.Lock:
    """A lock that is free in a child made by fork, whichever thread of the parent held it.

    >>> with lock():
    ...     pass
    """
    made = threading.Lock()
    _locks.add(made)
    return made


def _free_all() -> None:
    for one in list(_locks):
        one._at_fork_reinit()  # type: ignore[attr-defined]  # as `logging` and `concurrent.futures` do


os.register_at_fork(after_in_child=_free_all)
