"""Checks that something does not happen while a stream is held: each waits for a moment in which it would."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait

import torch

__all__ = ["LIMIT", "is_done_soon", "still_waits"]

LIMIT = 60.0
"""Seconds within which each awaited event must happen."""
_MOMENT = 0.1


def still_waits(future: Future[None]) -> bool:
    """True if a call still waits after a moment."""
    return bool(wait([future], _MOMENT).not_done)


def is_done_soon(stream: torch.Stream) -> bool:
    """True if a stream finishes its work within a moment."""
    end, pause = time.monotonic() + _MOMENT, threading.Event()
    while not (done := stream.query()) and time.monotonic() < end:
        pause.wait(0.001)
    return done
