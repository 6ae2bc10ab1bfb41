"""What a child made by `os.fork` must not take over from its parent.

A child has one thread: the one that forked. A lock that another thread held at that moment is never released
in the child. So locks that outlive a call are made here, and are free in every child. The state that they
guard is whole: it is replaced or changed by single steps of the interpreter.

Nothing else is renewed at the fork: threads, saves and connections of the parent are told by its process
number, and the child makes its own when it first needs them.
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
