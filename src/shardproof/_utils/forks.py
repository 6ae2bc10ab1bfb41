"""Locks that `os.fork` releases in the child.

A child has one thread: the one that forked. A lock that another thread had acquired would stay locked in the
child for ever. So this module creates every lock that outlives a call, and releases all of them in the child.
The state that they guard stays consistent, because each update is a single step of the interpreter.

A child also has every open file of its parent. A file that the parent removes would take its space, on a disk
or in memory, until the child ends. So descriptors of files are closed in the child (`close_in_child`).

Nothing else is reset. The child recognises threads, saves and connections of its parent by their process id,
and creates its own when it needs them.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

_locks: WeakSet[threading.Lock] = WeakSet()
_closed: WeakSet[_Closes] = WeakSet()


class _Closes(Protocol):
    """Has descriptors of its own. A second `close` does nothing."""

    def close(self) -> None: ...


def lock() -> threading.Lock:
    """A new lock that is unlocked in every forked child.

    >>> with lock():
    ...     pass
    """
    created = threading.Lock()
    _locks.add(created)
    return created


def close_in_child(owner: _Closes) -> None:
    """Closes `owner` in every forked child. The child's descriptors are copies: the parent's stay open."""
    _closed.add(owner)


def _release_all() -> None:
    for each in list(_locks):
        each._at_fork_reinit()  # type: ignore[attr-defined]  # as `logging` and `concurrent.futures` do
    for owner in list(_closed):
        owner.close()


os.register_at_fork(after_in_child=_release_all)
