"""A save of shardproof in Megatron's queue of asynchronous calls.

Megatron's queue starts a process for each call. The call is done when that process ends on all ranks.
shardproof writes from a thread of the training process, so the process of the queue only waits for that
thread. This module imports nothing of Megatron: the queue's persistent worker imports it by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import shardproof as sp

_POLL_SECONDS = 1.0
"""Seconds between two checks that the training process is alive."""


def call_of(pending: sp.PendingSave) -> tuple[Callable[..., None], tuple[Any, ...], list[Callable[[], None]]]:
    """The arguments of an ``AsyncRequest`` that ends when a save ends, and raises its error on all ranks.

    Returns:
        The function of the request, its arguments, and the functions that finalize the request.
    """
    reader, writer = Pipe(duplex=False)

    def notify() -> None:
        try:
            pending.wait_for_end()
        except sp.StorageError:
            pass  # `finish` raises it on the thread of the caller
        finally:
            writer.send_bytes(b"over")

    Thread(target=notify, name="shardproof-megatron", daemon=True).start()

    def finish() -> None:
        try:
            pending.result()
        finally:
            reader.close()
            writer.close()

    return wait_for_end, (reader, os.getpid()), [finish]


def wait_for_end(reader: Connection, trainer: int) -> None:
    """Waits until the pipe has the message that the save is over, or the process `trainer` has ended."""
    while not reader.poll(_POLL_SECONDS):
        try:
            os.kill(trainer, 0)
        except ProcessLookupError:
            return
