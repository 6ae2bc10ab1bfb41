"""Opening a checkpoint of any format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from shardproof._utils.arguments import check_boolean
from shardproof.engine.foreign import NATIVE, Foreign, foreign_faults, foreign_of, format_of, open_reader
from shardproof.engine.format import MANIFEST_NAME, STEP_FOLDER
from shardproof.engine.loading.checkpoint import Checkpoint, NativeCheckpoint
from shardproof.engine.loading.foreign_checkpoint import ForeignCheckpoint
from shardproof.engine.storage import Location, Storage, check_location
from shardproof.errors import NotCommittedError, StorageError

_log = logging.getLogger("shardproof")


def open_checkpoint(
    path: Location,
    *,
    format: str | None = None,  # noqa: A002 the word that users know
    trust_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Opens a committed checkpoint for reading, in one process.

    Args:
        path: the folder that holds `manifest.json`, or a checkpoint of another project: its folder or file.
            Or the URL of one.
        format: name of the format; None to find it. docs/formats.md lists the names.
        trust_pickle: True to unpickle values of other formats that are not plain data. That may run code of
            the checkpoint. Tensors never need it.
        storage_options: settings of an object store; see `shardproof.storage.ObjectStorage`. None: those of
            the environment.

    Returns:
        The checkpoint. Close it after use, or use it as a context manager.

    Raises:
        TypeError: an argument has a wrong type.
        NotCommittedError: there is no manifest, or `path` is the folder of a run.
        FormatError: manifest or index are damaged, or the format is not known.
        StorageError: a file is missing or unreadable.

    >>> import shardproof as sp, tempfile, torch
    >>> place = tempfile.mkdtemp() + "/ckpt"
    >>> _ = sp.save(place, {"w": torch.arange(12.0).reshape(4, 3), "note": "hi"})
    >>> with sp.open(place) as ckpt:
    ...     ckpt["w"][1:3, 0].tolist(), ckpt["note"], ckpt.shape("w")
    ([3.0, 6.0], 'hi', (4, 3))
    """
    check_location("path", path)
    check_boolean("trust_pickle", trust_pickle)
    return open_storage(foreign_of(path, storage_options), format=format, trust_pickle=trust_pickle)


def open_storage(
    foreign: Foreign | Storage,
    *,
    format: str | None = None,  # noqa: A002
    trust_pickle: bool = False,
    warn: bool = True,
) -> Checkpoint:
    """Opens a checkpoint in a storage; see `open_checkpoint`, which lists the errors.

    With `warn`, the notes of the reader are logged: what the format cannot verify, and what is not read.
    """
    place = foreign if isinstance(foreign, Foreign) else Foreign(foreign)
    name = format or format_of(place)
    if name == NATIVE:
        try:
            return NativeCheckpoint(place.storage)
        except NotCommittedError as error:
            if format is not None or place is not foreign:
                raise
            if (newest := _newest_step(place.storage)) is not None:
                raise NotCommittedError(
                    f"{place.location} is the folder of a run, and not a checkpoint. Name a step: the newest "
                    f"is {place.location}/{newest}. Checkpointer({place.location!r}).restore takes it, too",
                    **error.details,
                ) from error
            raise NotCommittedError(
                f"{error.message}\nIf another project wrote it, name its file, or its format with format= "
                "(--format on the command line).",
                **error.details,
            ) from error
    reader = open_reader(place, name)
    for note in reader.notes if warn else ():
        _log.warning("%s: %s", reader.location, note)
    with foreign_faults(reader.location):
        return ForeignCheckpoint(reader, trust_pickle=trust_pickle)


def _newest_step(run: Storage) -> str | None:
    """The folder of the committed step with the highest number; None if the folder is not that of a run."""
    try:
        matches = [match for name in run.folders() if (match := STEP_FOLDER.fullmatch(name)) is not None]
        steps = sorted((int(match[2]), match[0]) for match in matches if match[1] == "step")
        newest_first = [name for _, name in reversed(steps)]
        return next((name for name in newest_first if run.within(name).size(MANIFEST_NAME) is not None), None)
    except StorageError:
        return None  # the error that there is no checkpoint stands
