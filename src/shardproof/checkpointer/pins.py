"""Pins: steps that no retention policy removes.

Note "A pin belongs to the folder": the pin is a file in the folder of the step. It stays if a save replaces
the step. Without a manifest it pins nothing.
"""

from __future__ import annotations

import time

import msgspec

from shardproof.checkpointer.step_folders import PINNED_NAME, parse_step, read_note, step_name
from shardproof.errors import NotCommittedError, StorageError
from shardproof.format import MANIFEST_NAME
from shardproof.storage import Storage

__all__ = ["Pin", "pinned_steps", "read_pin", "remove_pin", "write_pin"]


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a step stays."""

    label: str
    """The user's text; empty if the file cannot be read as a pin."""
    time: float
    """When it was pinned, Unix seconds."""


def read_pin(folder: Storage) -> Pin | None:
    """The pin of a step's folder; None if it has none. A file that is no pin still pins the step.

    Raises:
        StorageError: the storage cannot read it at the moment.
    """
    try:
        data = read_note(folder, PINNED_NAME)
    except StorageError as error:
        if error.details.get("lost_link"):
            return None
        raise
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Pin)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Pin(label="", time=0.0)


def write_pin(run: Storage, step: int, label: str) -> None:
    """Pins a committed step, durably.

    Raises:
        NotCommittedError: the step is not committed.
        StorageError: the storage failed.
    """
    folder = run.within(step_name(step))
    if folder.size(MANIFEST_NAME) is None:
        raise NotCommittedError(f"{folder.location} is no committed step, so it cannot be pinned")
    data = msgspec.json.encode(Pin(label=label, time=time.time())) + b"\n"
    folder.publish(PINNED_NAME, data, replace=True)
    if folder.size(MANIFEST_NAME) is None:  # another process removed the step meanwhile
        folder.delete(PINNED_NAME)
        raise NotCommittedError(f"{folder.location} was removed while it was pinned")


def remove_pin(run: Storage, step: int) -> bool:
    """Removes the pin of a step. False if it has none."""
    folder = run.within(step_name(step))
    if folder.size(PINNED_NAME) is None:
        return False
    folder.delete(PINNED_NAME)
    return True


def pinned_steps(run: Storage) -> dict[int, Pin]:
    """The pinned and committed steps of a run, ascending."""
    pins: dict[int, Pin] = {}
    for step, name in sorted(
        (step, name) for name in run.folders() if (step := parse_step(name)) is not None
    ):
        folder = run.within(name)
        pin = read_pin(folder)
        if pin is not None and folder.size(MANIFEST_NAME) is not None:
            pins[step] = pin
    return pins
