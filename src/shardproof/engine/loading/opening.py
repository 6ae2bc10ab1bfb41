"""Opening a checkpoint of any format.

Checkpoints of other projects are planned as any other, and read through their descriptions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof._utils.arguments import check_boolean
from shardproof._utils.humanize import listed
from shardproof._utils.mappings import LazyMapping
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import (
    NATIVE,
    Extent,
    Foreign,
    FormatReader,
    StoredBox,
    Unreadable,
    check_repeats,
    foreign_faults,
    foreign_of,
    format_of,
    opaque_names,
    open_reader,
    parts_of,
)
from shardproof.engine.format import TensorRecord, newest_step
from shardproof.engine.geometry import row_pointers
from shardproof.engine.loading.box_reads import BoxReads
from shardproof.engine.loading.checkpoint import OPENED_FIRST, Checkpoint, NativeCheckpoint, Reads, open_once
from shardproof.engine.loading.destinations import DestinationWriter
from shardproof.engine.planning import ChunkTable
from shardproof.engine.state import encode_plain
from shardproof.engine.storage import Location, Storage, check_location
from shardproof.errors import NotCommittedError, PlainDataError, StorageError

_UNTRUSTED = (
    "exclude= (--exclude) leaves the key out. With trust_pickle=True (--trust-pickle), torch unpickles the "
    "value, which may run code of the checkpoint. The result has to be plain data: register enums and "
    "dataclasses first (sp.register_enum, sp.register_dataclass; --register MODULE.CLASS)"
)
_TRUSTED = (
    "torch unpickled the value, and only plain data can be read. Register enums and dataclasses "
    "(sp.register_enum, sp.register_dataclass; --register MODULE.CLASS). Of other classes, leave the key out "
    "with exclude= (--exclude), and read it with torch.load"
)


class ForeignCheckpoint(Checkpoint):
    """A checkpoint of another project.

    With `trust_pickle`, torch unpickles plain values, which may run code of the checkpoint.
    """

    tiling_advice = (
        "A file of the checkpoint or of its metadata is damaged or missing, or its writer lost data: restore "
        "another step"
    )

    def __init__(self, reader: FormatReader, *, trust_pickle: bool = False) -> None:
        self.reader = reader
        self.format, self.location = reader.name, reader.location
        self.attempt, self.step, self.world_size = reader.identity, reader.step, reader.world_size
        self.aliases = reader.aliases
        self.tensors = [TensorRecord(key, item.dtype, item.shape) for key, item in reader.tensors.items()]
        self.boxes: list[StoredBox] = [box for item in reader.tensors.values() for box in item.boxes]
        """The stored box of each row of the chunk table."""
        self.files = list(dict.fromkeys(box.file for box in self.boxes))
        """Names of the files that hold tensors; the chunk table refers to them by row."""
        self.table = _table(reader, self.files)
        keys = [*reader.object_keys(), *reader.unreadable]
        self.objects = LazyMapping(keys, partial(_plain_value, reader, trust_pickle))
        self.proved: set[Extent] = set()
        """Extents whose checksum was compared with all their bytes."""
        self._files = reader.files()
        self._sized: set[str] = set()
        self._index()

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the writer; empty if the format has none."""
        return self.reader.user_metadata

    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """Recorded paths of keys in the nested state dict; see `Checkpoint.paths`."""
        return self.reader.paths

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.reader.close()

    def check_files(self, rows: NDArray[np.int64] | None = None) -> None:
        """Checks that files exist, with the size that the format records; see `Checkpoint.check_files`."""
        for fault in self.file_faults(rows):
            raise fault

    def file_faults(self, rows: NDArray[np.int64] | None = None) -> Iterator[StorageError]:
        """The errors of files that are missing, or do not have the size that the format records.

        A file that was cut may hold the whole boxes of some rows. Then it has no error.

        Args:
            rows: rows of the chunk table whose files are checked; None for all files.
        """
        sizes = self._files
        needed = sizes.keys() if rows is None else {self.boxes[row].file for row in rows.tolist()}
        for name in sorted(needed - self._sized):
            found, expected = self.reader.storage.size(name), sizes.get(name)
            if found is None:
                yield self.reader.missing(name)
            elif expected is None or found == expected:
                self._sized.add(name)
            elif (fault := self._size_fault(name, found, expected, rows)) is not None:
                yield fault

    def _size_fault(
        self, name: str, found: int, expected: int, rows: NDArray[np.int64] | None
    ) -> StorageError | None:
        """The error of a file of another size; None if it was cut behind the boxes of some rows."""
        lost = self.reader.keys_behind(name, found) if found < expected else set()
        if found < expected and rows is not None:
            wanted = {self.tensors[tensor].key for tensor in self.table.tensor[rows].tolist()}
            if wanted.isdisjoint(lost):
                return None
        path = f"{self.reader.storage.location}/{name}"
        advice = "Restore it from a copy"
        if lost:
            advice += (
                f". It lacks bytes of {listed(lost)}. The other values can be read: leave these out with "
                "exclude= (--exclude)"
            )
        return StorageError(
            f"{path} has {found} bytes, expected {expected}: it was cut or replaced. {advice}",
            file=path,
            missing=False,
            **({"keys": sorted(lost)} if lost else {}),
        )

    def open_files(self, rows: NDArray[np.int64]) -> None:
        """Opens the first files of some boxes; see `Checkpoint.open_files`."""
        names = sorted(self._files.keys() & {self.boxes[row].file for row in rows.tolist()})
        for name in names[:OPENED_FIRST]:
            open_once(self.reader.storage, name)

    def reads(self, writer: DestinationWriter, rows: NDArray[np.int64]) -> Reads:
        """Plans to read some boxes; see `Checkpoint.reads`."""
        return BoxReads(self.boxes, self.tensors, self.table, writer, rows, self.proved)


def _table(reader: FormatReader, names: Sequence[str]) -> ChunkTable:
    """The stored boxes as a chunk table. Its bytes are those of the elements, not those in the file."""
    descriptions = list(reader.tensors.values())
    boxes = [box for item in descriptions for box in item.boxes]
    counts = [len(item.boxes) for item in descriptions]
    files = {name: at for at, name in enumerate(names)}
    itemsizes = [DTYPES[item.dtype].itemsize for item in descriptions for _ in item.boxes]
    return ChunkTable(
        np.repeat(np.arange(len(descriptions)), counts),
        np.array([files[box.file] for box in boxes], np.int64),
        np.array([box.start for box in boxes], np.int64),
        np.array([prod(box.sizes) * size for box, size in zip(boxes, itemsizes, strict=True)], np.int64),
        np.zeros((len(boxes), 2), np.uint64),
        row_pointers([len(box.sizes) for box in boxes]),
        np.array([at for box in boxes for at in box.offsets], np.int64),
        np.array([size for box in boxes for size in box.sizes], np.int64),
    )


def _plain_value(reader: FormatReader, trust_pickle: bool, key: str) -> Any:
    """A plain value of a foreign checkpoint, encoded."""
    unreadable = reader.unreadable.get(key)
    value: Any = None
    if unreadable is None:
        with foreign_faults(reader.location, key):
            value = reader.object(key, trust_pickle=trust_pickle)
        unreadable = next(parts_of(value, Unreadable), None)
    if unreadable is not None:
        raise PlainDataError(
            f"{reader.location}: {key} is {unreadable.kind}, and shardproof does not read it. "
            f"{unreadable.remedy}. exclude= (--exclude) leaves the key out",
            path=key,
        )
    try:
        with foreign_faults(reader.location, key):
            if names := opaque_names(value):
                raise PlainDataError(f"{key}: {', '.join(names[:5])} cannot be read as plain data", path=key)
            check_repeats(value)
            return encode_plain(value, key)
    except PlainDataError as error:
        advice = _TRUSTED if trust_pickle else _UNTRUSTED
        raise PlainDataError(f"{reader.location}: {error.message}. {advice}", **error.details) from error


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
            newest = None
            with suppress(StorageError):  # then the error that there is no checkpoint stands
                newest = newest_step(place.storage)
            if newest is not None:
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
