"""Counts the instructions that a call runs. On a busy machine, seconds do not measure code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from shardproof._utils.contexts import no_garbage_collection


def count_instructions(work: Callable[[], object]) -> int:
    """Number of Python instructions that `work` runs on this thread. A call into C counts as one.

    >>> count_instructions(lambda: sorted(range(2))) == count_instructions(lambda: sorted(range(900)))
    True
    >>> few, many = (count_instructions(lambda: [n + 1 for n in range(count)]) for count in (2, 900))
    >>> many - few > 3 * 898
    True
    """
    count = 0

    def seen(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return seen

    before = sys.gettrace()
    with no_garbage_collection():  # callbacks of a collection would be counted
        sys.settrace(seen)
        try:
            work()
        finally:
            sys.settrace(before)
    return count
