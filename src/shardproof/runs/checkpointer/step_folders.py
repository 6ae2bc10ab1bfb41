"""The folders of a run: their names, the names of the files that shardproof writes there, and the marks.

A mark is a small file: the pin of a step, the verdict on a suspect, or the nodes of a run.

Note "Suspects stand apart": a suspect is the checkpoint of a step whose validation failed. It has the same
layout as a step, in a folder of another name. So restore, retention, incremental saves and versions without
suspects ignore it. Only code that requests suspects sees it.

Note "Linked steps": the folder of a step may be a symbolic link to a folder outside the run. Restore,
listings and references treat it like any other step. Retention and prune remove neither its files nor the
link, because the files may belong to another run or to an archive. A dangling link is a step that cannot be
read at the moment. A link to another folder of the same run is a second name, and not a step.

Note "A pin belongs to the folder": no retention policy removes a pinned step. The pin is a file in the folder
of the step. It stays if a save replaces the step. Without a manifest it pins nothing.

Note "Settled for one attempt": a verdict settles a suspect. It is a file in the folder of the suspect, and
names its attempt. So a new suspect that replaces a settled one is not settled, whenever its save dies.

Note "A mark for people and commands": `Checkpointer` writes the mark of a node into the run's folder on each
node, and does not rely on it: it asks the present nodes for their files. Commands read it, because without it
a step whose files are on several nodes looks like one that lost files.
"""

from __future__ import annotations

import logging
import operator
import re
import time
from typing import Any, NamedTuple

import msgspec

from shardproof.engine.format import MANIFEST_NAME, STEP_FOLDER, read_manifest, read_seal
from shardproof.engine.storage import Storage, map_requests
from shardproof.errors import FormatError, NotCommittedError, StorageError, StructureError

SETTLED_NAME = "settled.json"
"""The file in a suspect's folder with the verdict."""
PINNED_NAME = "pinned.json"
"""The file in a step's folder with its pin."""
_NODE_NAME = "node.json"
"""The file that marks a folder as that of one node, with the files of that node only."""
_LONGEST_MARK = 1 << 20
"""Bytes of a mark that are read. A longer one is invalid."""

_DATA = re.compile(
    r"(?:shards/[0-9]+-|index-)(?P<attempt>[^/]+?)\.safetensors(?:\.[^/]+\.tmp)?"
    rf"|{re.escape(MANIFEST_NAME)}(?:\.[^/]+\.tmp)?"
)
_SETTLED = re.compile(rf"{re.escape(SETTLED_NAME)}(?:\.[^/]+\.tmp)?")
_PINNED = re.compile(rf"{re.escape(PINNED_NAME)}(?:\.[^/]+\.tmp)?")

_log = logging.getLogger("shardproof")


class StepFolder(NamedTuple):
    """The folder of a step or of a suspect. Suspects sort after the step of their number.

    >>> StepFolder(1000).name, StepFolder(1000, suspect=True).name, str(StepFolder(7, suspect=True))
    ('step-00001000', 'suspect-00001000', 'suspect step 7')
    """

    step: int
    suspect: bool = False

    @property
    def name(self) -> str:
        """Its name in the run. Names sort as steps do, up to 8 digits.

        Raises:
            ValueError: `step` is not a valid number.
        """
        step = self.step
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise ValueError(f"a step is a whole number from 0 to 10**18 - 1, not {step!r}")
        return f"{'suspect' if self.suspect else 'step'}-{step:08d}"

    def __str__(self) -> str:
        return f"suspect step {self.step}" if self.suspect else f"step {self.step}"


def step_name(step: int) -> str:
    """The folder of a step.

    >>> step_name(1000)
    'step-00001000'
    """
    return StepFolder(step).name


def parse_folder(name: str) -> StepFolder | None:
    """The step or suspect with this folder name; None for any other name.

    >>> parse_folder("suspect-00001000"), parse_folder("suspect-1000")
    (StepFolder(step=1000, suspect=True), None)
    """
    match = STEP_FOLDER.fullmatch(name)
    if match is None:
        return None
    folder = StepFolder(int(match[2]), match[1] == "suspect")
    return folder if folder.name == name else None


class _InvalidStep(str):
    """The text of an invalid step, which an error shows as the caller wrote it."""

    __slots__ = ()
    __repr__ = str.__str__


def parse_argument(step: Any, *, suspect: bool) -> tuple[Any, str]:
    """A step that a caller passes, and its folder. An invalid one becomes a text.

    A save reports the text to rank 0, so that every rank raises the error.
    """
    try:
        number = operator.index(step)
        return (step if isinstance(step, bool) else number), StepFolder(number, suspect).name
    except (TypeError, ValueError):
        return _InvalidStep(repr(step)), "invalid-step"


def checked_step(step: Any) -> int:
    """A step that a caller passes, as an int.

    Raises:
        StructureError: it is no valid step.

    >>> checked_step(1000)
    1000
    """
    number, _ = parse_argument(step, suspect=False)
    if isinstance(number, bool) or not isinstance(number, int):
        raise StructureError(f"step is {step!r}, not an int from 0 to 10**18 - 1")
    return number


def parse_step(name: str) -> int | None:
    """The step with this folder name; None for any other name, also that of a suspect.

    >>> parse_step("step-00001000"), parse_step("step-1000"), parse_step("suspect-00001000")
    (1000, None, None)
    """
    folder = parse_folder(name)
    return None if folder is None or folder.suspect else folder.step


def folders_in(run: Storage) -> list[StepFolder]:
    """The folders of steps and suspects in a run, ascending."""
    return sorted(filter(None, map(parse_folder, run.folders())))


def steps_in(run: Storage) -> list[int]:
    """The numbers of the step folders of a run, without suspects, ascending."""
    return [folder.step for folder in folders_in(run) if not folder.suspect]


def steps_with_manifest(run: Storage) -> list[int]:
    """Those of `steps_in` whose folder has a manifest."""
    steps = steps_in(run)
    sizes = map_requests(run, lambda step: run.size(f"{step_name(step)}/{MANIFEST_NAME}"), steps)
    return [step for step, size in zip(steps, sizes, strict=True) if size is not None]


def seal_in(place: Storage) -> bytes | None:
    """The seal of the manifest in a step's folder, which no other manifest has; None without a manifest.

    Empty if the manifest is too short for a seal, or is being replaced.
    """
    try:
        seal = read_seal(place)
        return b"" if seal is None and place.size(MANIFEST_NAME) is not None else seal
    except StorageError as error:
        if "byte_count" in error.details:  # shorter than its size just was
            return b""
        raise


def attempt_of(name: str, folder: str = "") -> str | None:
    """The attempt that a file of a checkpoint belongs to.

    Args:
        name: name of the file, within its folder.
        folder: the folder's name in the run.

    Returns:
        Empty for the manifest, for the verdict on a suspect and for a pin, whose names have no attempt. None
        for a file that shardproof does not write.

    >>> attempt_of("shards/00003-8f2c.safetensors"), attempt_of("manifest.json.x1.tmp")
    ('8f2c', '')
    """
    match = _DATA.fullmatch(name)
    if match is not None:
        return match["attempt"] or ""
    parsed = parse_folder(folder)
    if parsed is None:
        return None
    return "" if (_SETTLED if parsed.suspect else _PINNED).fullmatch(name) else None


def is_ours(name: str, folder: str = "") -> bool:
    """True if a file of a checkpoint's folder has a name that shardproof gives there (see `attempt_of`).

    >>> is_ours("shards/00003-8f2c.safetensors"), is_ours("manifest.json.x1.tmp"), is_ours("tokenizer.json")
    (True, True, False)
    >>> is_ours("settled.json", "suspect-00001000"), is_ours("settled.json", "step-00001000")
    (True, False)
    """
    return attempt_of(name, folder) is not None


def files_in(place: Storage, folder: str) -> list[str]:
    """The names of the files that shardproof wrote in a checkpoint's folder (see `is_ours`)."""
    return [name for name in place.list() if is_ours(name, folder)]


def place_of(run: Storage, folder: str) -> Storage:
    """A folder of a run; for ".", the run's folder itself."""
    return run if folder == "." else run.within(folder)


def read_mark(folder: Storage, name: str) -> bytes | None:
    """A small file in a folder, such as `PINNED_NAME`; None if it does not exist."""
    try:
        return folder.read(name, 0, min(folder.size(name) or 0, _LONGEST_MARK))
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
