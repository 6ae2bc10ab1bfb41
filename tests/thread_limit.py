"""A process that cannot start threads: at its limit, or at the end of the interpreter (CPython 3.12)."""

from __future__ import annotations

import threading

import pytest


def limit_threads(monkeypatch: pytest.MonkeyPatch, count: int = 0) -> None:
    """Lets this process start `count` more threads."""
    start, left = threading.Thread.start, count

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
