"""Names of the folders of a run, and of the files in them that shardproof writes.

Note "Suspects stand apart": a suspect is the checkpoint of a step whose validation failed. It has the same
layout as a step, in a folder of another name. So restore, retention, incremental saves and versions without
suspects ignore it. Only code that requests suspects sees it.

Note "Linked steps": the folder of a step may be a symbolic link to a folder outside the run. Restore,
listings and references treat it like any other step. Retention and prune remove neither its files nor the
link, because the files may belong to another run or to an archive. A dangling link is a step that cannot be
read at the moment. A link to another folder of the same run is a second name, and not a step.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shardproof.engine.format import MANIFEST_NAME, STEP_FOLDER, read_seal
from shardproof.engine.storage import Storage, map_requests
from shardproof.errors import StorageError

SETTLED_NAME = "settled.json"
"""The file in a suspect's folder with the verdict."""
PINNED_NAME = "pinned.json"
"""The file in a step's folder with its pin."""

_DATA = re.compile(
    r"(?:shards/[0-9]+-|index-)(?P<attempt>[^/]+?)\.safetensors(?:\.[^/]+\.tmp)?"
    rf"|{re.escape(MANIFEST_NAME)}(?:\.[^/]+\.tmp)?"
)
_SETTLED = re.compile(rf"{re.escape(SETTLED_NAME)}(?:\.[^/]+\.tmp)?")
_PINNED = re.compile(rf"{re.escape(PINNED_NAME)}(?:\.[^/]+\.tmp)?")


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
