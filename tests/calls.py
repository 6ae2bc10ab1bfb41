"""What work costs, counted: on a busy machine seconds say nothing of the code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from shardproof.garbage import no_garbage_collection


def count_calls(work: Callable[[], object]) -> int:
    """How many functions a piece of work calls on this thread, those of Python and those written in C.

    >>> count_calls(lambda: [len("ab"), len("c")])
    3
    """
    calls = -1  # the last is that of `sys.setprofile` itself

    def seen(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with no_garbage_collection():  # whoever listens to collections would be counted
        sys.setprofile(seen)
        try:
            work()
        finally:
            sys.setprofile(None)
    return calls
