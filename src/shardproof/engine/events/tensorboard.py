"""Scalars of this rank's saves and loads for TensorBoard, by step.

This module imports no TensorBoard. The caller brings the writer: torch's (which needs ``pip install
'shardproof[tensorboard]'``), or any object with `add_scalar`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from shardproof.engine.events.phases import Event, Subscription, hub

__all__ = ["Writer", "write_to"]


class Writer(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that `write_to` uses."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None) -> object:
        """Adds one value."""
        ...


def write_to(writer: Writer) -> Subscription:
    """Adds scalars for each phase that ends on this rank.

    A phase ``write`` of a ``save`` adds ``shardproof/save/write/seconds``. If the phase moved bytes, it also
    adds ``shardproof/save/write/GB`` and ``shardproof/save/write/GB_per_second``. A failed phase adds
    ``shardproof/save/write/failed`` with the value 1. The step is that of the operation. Without a step,
    phases count from 0.

    Args:
        writer: the writer, which the caller closes. Use it on one rank, or give each rank a folder.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    >>> class Printer:
    ...     def add_scalar(self, tag, scalar_value, global_step=None):
    ...         print(tag, global_step)
    >>> from shardproof import events
    >>> with write_to(Printer()), events.phase("save runs/a", "write", step=7) as phase:
    ...     phase.progress(1_000, 1_000)
    shardproof/save/write/seconds 7
    shardproof/save/write/GB 7
    shardproof/save/write/GB_per_second 7
    """
    return hub.subscribe(_Scalars(writer))


class _Scalars:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._counts: Counter[tuple[str, str]] = Counter()

    def __call__(self, event: Event) -> None:
        if event.kind not in ("end", "failed"):
            return
        step = event.step
        if step is None:
            step = self._counts[event.action, event.phase]
            self._counts[event.action, event.phase] += 1
        head = f"shardproof/{event.action}/{event.phase}"
        if event.kind == "failed":
            self._writer.add_scalar(f"{head}/failed", 1, step)
            return
        self._writer.add_scalar(f"{head}/seconds", event.seconds, step)
        if event.done:
            self._writer.add_scalar(f"{head}/GB", event.done / 1e9, step)
            speed = event.done / max(event.seconds, 1e-9) / 1e9
            self._writer.add_scalar(f"{head}/GB_per_second", speed, step)
