"""Opening a checkpoint of any format."""

from __future__ import annotations

import logging
import os

from shardproof.format import MANIFEST_NAME
from shardproof.interop import Foreign, open_reader, recognized
from shardproof.loading.checkpoint import Checkpoint, NativeCheckpoint
from shardproof.loading.foreign_checkpoint import ForeignCheckpoint
from shardproof.storage import LocalStorage, Storage, StrOrBytesPath

__all__ = ["foreign_of", "open_checkpoint", "open_storage"]

_log = logging.getLogger("shardproof")

NATIVE = "shardproof"
"""Name of the project's own format."""


def open_checkpoint(
    path: StrOrBytesPath,
    *,
    format: str | None = None,  # noqa: A002 the word that users know
    trust_pickle: bool = False,
) -> Checkpoint:
    """Opens a committed checkpoint for reading, in one process.

    Args:
        path: the folder that holds `manifest.json`, or a checkpoint of another project: its folder or file.
        format: name of the format; None to find it. docs/formats.md lists the names.
        trust_pickle: True to unpickle values of other formats that are no plain data. That may run code of
            the checkpoint. Tensors never need it.

    Raises:
        NotCommittedError: there is no manifest.
        FormatError: manifest or index are damaged, or the format is not known.
        StorageError: a file is missing or unreadable.

    >>> import shardproof as sp, tempfile, torch
    >>> place = tempfile.mkdtemp() + "/ckpt"
    >>> _ = sp.save(place, {"w": torch.arange(12.0).reshape(4, 3), "note": "hi"})
    >>> with sp.open(place) as ckpt:
    ...     ckpt["w"][1:3, 0].tolist(), ckpt["note"], ckpt.shape("w")
    ([3.0, 6.0], 'hi', (4, 3))
    """
    return open_storage(foreign_of(path), format=format, trust_pickle=trust_pickle)


def foreign_of(path: StrOrBytesPath) -> Foreign:
    """A path as a folder, or as a file in its folder."""
    if os.path.isfile(path):
        folder, name = os.path.split(os.fsdecode(path))
        return Foreign(LocalStorage(folder or "."), name)
    return Foreign(LocalStorage(path))


def open_storage(
    foreign: Foreign | Storage,
    *,
    format: str | None = None,  # noqa: A002
    trust_pickle: bool = False,
) -> Checkpoint:
    """Opens a checkpoint in a storage; see `open_checkpoint`."""
    place = foreign if isinstance(foreign, Foreign) else Foreign(foreign)
    name = format or (None if place.has(MANIFEST_NAME) else recognized(place)) or NATIVE
    if name != NATIVE or place.file is not None:
        reader = open_reader(place, None if name == NATIVE else name)
        for note in reader.notes:
            _log.warning("%s: %s", reader.location, note)
        return ForeignCheckpoint(reader, trust_pickle=trust_pickle)
    return NativeCheckpoint(place.storage)
