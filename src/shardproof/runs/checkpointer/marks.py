"""Marks, which are small files: the pin of a step, the verdict on a suspect, and the nodes of a run.

Note "A pin belongs to the folder": no retention policy removes a pinned step. The pin is a file in the folder
of the step. It stays if a save replaces the step. Without a manifest it pins nothing.

Note "Settled for one attempt": a suspect is the checkpoint of a step whose validation failed, and a verdict
settles it. The verdict is a file in the folder of the suspect, and names its attempt. So a new suspect that
replaces a settled one is not settled, at whatever moment its save dies.

Note "A mark for people and commands": `Checkpointer` writes the mark of a node into the run's folder on each
node, and does not rely on it: it asks the present nodes for their files. Commands read it, because without it
a step whose files are on several nodes looks like one that lost files.
"""

from __future__ import annotations

import logging
import time

import msgspec

from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.runs.checkpointer.step_folders import (
    PINNED_NAME,
    SETTLED_NAME,
    StepFolder,
    folders_in,
    step_name,
)

_NODE_NAME = "node.json"
"""The file that marks a folder as that of one node, with the files of that node only."""

_LONGEST = 1 << 20
"""Bytes of a mark that are read. A longer one is invalid."""

_log = logging.getLogger("shardproof")


def read_mark(folder: Storage, name: str) -> bytes | None:
    """A small file in a folder, such as `PINNED_NAME`; None if it does not exist."""
    try:
        return folder.read(name, 0, min(folder.size(name) or 0, _LONGEST))
    except StorageError as error:
        if error.details.get("missing"):
            return None
        raise


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a step stays."""

    label: str
    """The user's text; empty if the file cannot be read as a pin."""
    time: float
    """When it was pinned, Unix seconds."""


def read_pin(folder: Storage) -> Pin | None:
    """The pin of a step's folder; None if it has none. A file that is no pin still pins the step."""
    try:
        data = read_mark(folder, PINNED_NAME)
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


def remove_pin(run: Storage, step: int) -> None:
    """Removes the pin of a step, if it has one."""
    folder = run.within(step_name(step))
    if folder.size(PINNED_NAME) is not None:
        folder.delete(PINNED_NAME)


def pinned_steps(run: Storage) -> dict[int, Pin]:
    """The pinned and committed steps of a run, ascending."""
    pins: dict[int, Pin] = {}
    for folder in folders_in(run):
        place = run.within(folder.name)
        pin = None if folder.suspect else read_pin(place)
        if pin is not None and place.size(MANIFEST_NAME) is not None:
            pins[folder.step] = pin
    return pins


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a suspect."""

    attempt: str
    """Attempt of the suspect; empty if its manifest could not be read."""
    verdict: str
    time: float
    """Unix seconds."""


def read_settled(folder: Storage) -> Settled | None:
    """The verdict on the suspect in a folder; None if it is not settled.

    Raises:
        StorageError: the storage cannot read it at the moment.
    """
    data = read_mark(folder, SETTLED_NAME)
    if data is None:
        return None
    try:
        settled = msgspec.json.decode(data, type=Settled)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _log.warning(
            "%s/%s cannot be read (%s), so the suspect counts as not settled: settle it again",
            folder.location,
            SETTLED_NAME,
            error,
        )
        return None
    return settled if settled.attempt == _attempt(folder) else None


def write_settled(folder: Storage, verdict: str) -> bool:
    """Settles the suspect in a folder, durably. Returns False, and writes nothing, if there is none."""
    if folder.size(MANIFEST_NAME) is None:
        return False
    settled = Settled(attempt=_attempt(folder), verdict=verdict, time=time.time())
    folder.publish(SETTLED_NAME, msgspec.json.encode(settled) + b"\n", replace=True)
    return True


def suspects_in(run: Storage) -> dict[StepFolder, Settled | None]:
    """Committed suspects of a run, ascending, with their verdicts; None for an unsettled one."""
    places = {folder: run.within(folder.name) for folder in folders_in(run) if folder.suspect}
    return {
        folder: read_settled(place)
        for folder, place in places.items()
        if place.size(MANIFEST_NAME) is not None
    }


def unsettled_in(run: Storage) -> list[StepFolder]:
    """Committed suspects of a run without a verdict, ascending."""
    return [folder for folder, settled in suspects_in(run).items() if settled is None]


def is_settled(run: Storage, folder: StepFolder) -> bool:
    """True for a suspect with a verdict."""
    return folder.suspect and read_settled(run.within(folder.name)) is not None


def _attempt(folder: Storage) -> str:
    try:
        return read_manifest(folder).attempt
    except (FormatError, NotCommittedError):
        return ""


class NodeMark(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of the last job that used a folder with ``node_local=True``.

    Example:
        >>> print(NodeMark(nodes=("a:/nvme/run", "b:/nvme/run"), own=0, replicas=0).sentence)
        this folder is that of one of 2 nodes: files of the other nodes (b:/nvme/run) are not here
    """

    nodes: tuple[str, ...]
    """Host and folder of each node."""
    own: int
    """The node of this folder."""
    replicas: int

    @property
    def sentence(self) -> str:
        """The meaning of the mark, for messages."""
        others = [name for number, name in enumerate(self.nodes) if number != self.own]
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return (
            f"this folder is that of one of {len(self.nodes)} nodes: files of the other nodes "
            f"({', '.join(others[:3])}{more}) are not here"
        )


def read_node_mark(run: Storage) -> NodeMark | None:
    """The mark of a run's folder; None if it is not that of one of several nodes."""
    data = read_mark(run, _NODE_NAME)
    if data is None:
        return None
    try:
        mark = msgspec.json.decode(data, type=NodeMark)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return mark if len(mark.nodes) > 1 else None


def write_node_mark(run: Storage, mark: NodeMark) -> None:
    """Writes the mark into a run's folder, if it has another one or none."""
    data = msgspec.json.encode(mark) + b"\n"
    if run.size(_NODE_NAME) != len(data) or run.read(_NODE_NAME) != data:
        run.publish(_NODE_NAME, data, replace=True)
