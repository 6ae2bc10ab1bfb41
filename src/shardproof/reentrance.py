"""Refuses calls that a signal handler or a callback makes from inside another call on the same thread.

A handler interrupts the main thread's call, which holds its locks until the handler returns. A save that
the handler starts would wait for itself. So `refuse_inside` refuses such a call at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from shardproof.errors import ReentrantCallError

Function = TypeVar("Function", bound=Callable[..., Any])

_guarded: dict[CodeType, str] = {}
"""The code of each guarded function, and its name in messages."""


def guarded(name: str) -> Callable[[Function], Function]:
    """Marks a function inside which `refuse_inside` raises.

    `refuse_inside` looks for the function on the thread's stack. A flag is not enough: an interrupt can
    arrive between setting it and the block that resets it.

    Args:
        name: name of the function in messages.
    """

    def mark(function: Function) -> Function:
        _guarded[function.__code__] = name
        return function

    return mark


def refuse_inside(call: str, *functions: str) -> None:
    """Raises if this thread is inside a guarded function.

    Args:
        call: name of the call in the message.
        functions: names of the guarded functions to look for; without any, all of them.

    Raises:
        ReentrantCallError: a guarded function is on this thread's stack, below the caller.

    >>> @guarded("load")
    ... def load():
    ...     refuse_inside("save")
    >>> load()
    Traceback (most recent call last):
    ...
    shardproof.errors.ReentrantCallError: save was called from inside load on the same thread, by a ...
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        inside = _guarded.get(frame.f_code)
        if inside is not None and (not functions or inside in functions):
            raise ReentrantCallError(
                f"{call} was called from inside {inside} on the same thread, by a signal handler or a "
                f"callback. {call} did nothing, and {inside} continues. Set a flag in the handler, and save "
                "at the next step boundary",
                call=call,
                inside=inside,
            )
        frame = frame.f_back
