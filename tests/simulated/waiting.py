"""What does not happen while a stream is held: looked at for a moment, in which it would."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait

import torch

__all__ = ["LIMIT", "goes_on", "is_done_soon"]

LIMIT = 60.0
"""Seconds within which everything has to happen."""
_MOMENT = 0.1


def goes_on(future: Future[None]) -> bool:
    """Whether a call is still waiting."""
    return bool(wait([future], _MOMENT).not_done)


def is_done_soon(stream: torch.Stream) -> bool:
    """Whether a stream does all that it was given."""
    end, pause = time.monotonic() + _MOMENT, threading.Event()
    while not (done := stream.query()) and time.monotonic() < end:
        pause.wait(0.001)
    return done
