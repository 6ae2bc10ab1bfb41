"""The accident that the demo arranges: a rank that is in the middle of writing when the job is killed.

Left to chance, a kill would fall between two operations of a save that takes milliseconds. So one rank is
made to stop once half of a write is done; the demo waits for that, and then kills the whole job.
"""

from __future__ import annotations

import threading
from pathlib import Path

from shardproof.storage import LocalStorage, Sink

__all__ = ["stop_in_the_middle"]

PATIENCE = 300.0
"""Seconds that a stopped rank waits for its end, should nobody come to kill it."""


def stop_in_the_middle(folder_name: str, mark: Path) -> None:
    """From now on, this process stops inside its first write into a checkpoint folder of that name.

    It does so from outside, by replacing a method of the storage: the engine has no switch for accidents.

    Args:
        folder_name: of the step, as ``step-00000012``.
        mark: file to make once the bytes are written.
    """
    create = LocalStorage.create

    def create_doomed(storage: LocalStorage, name: str) -> Sink:
        sink = create(storage, name)
        return _Unfinished(sink, mark) if folder_name in f"{storage.location}/{name}" else sink

    setattr(LocalStorage, "create", create_doomed)  # noqa: B010 (mypy refuses to assign a method)


class _Unfinished:
    """A file whose first write gets half way."""

    def __init__(self, sink: Sink, mark: Path) -> None:
        self._sink = sink
        self._mark = mark

    def write_at(self, start: int, buffer: memoryview) -> None:
        whole_blocks = len(buffer) // 2 // 4096 * 4096
        self._sink.write_at(start, buffer[: whole_blocks or len(buffer)])
        self._mark.touch()
        threading.Event().wait(PATIENCE)
        raise TimeoutError(
            f"stopped in the middle of a write for the demo, and not killed within {PATIENCE:.0f} s"
        )

    def finish(self, size: int) -> None:
        self._sink.finish(size)

    def abort(self) -> None:
        self._sink.abort()
