"""Functions of the C library that Python lacks. They run without the GIL."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def has(name: str) -> bool:
    """True if the C library has a function of this name.

    >>> has("getpid"), has("no_such_function")
    (True, False)
    """
    return hasattr(_library(), name)


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns -1 and sets errno when it fails.

    Args:
        name: name of a function that the library has (see `has`).
        arguments: ctypes values, so that each has the width that the function expects.

    Raises:
        OSError: the function failed.

    >>> call("close", ctypes.c_int(-1))
    Traceback (most recent call last):
    OSError: [Errno 9] close: Bad file descriptor
    """
    if getattr(_library(), name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
