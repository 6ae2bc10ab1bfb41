"""Writes one file of ``torch.save``, streamed in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardproof.dtypes import DTYPES
from shardproof.engine.storage import Storage
from shardproof.formats.torch.torch_archive import ArchiveTensor, TorchArchive, archive_of
from shardproof.formats.writer import (
    BoxSource,
    Contents,
    FormatWriter,
    Unit,
    WriteOptions,
    check_units,
    new_file,
    notes_of,
)

_FILE = "checkpoint.pt"


class TorchWriter(FormatWriter):
    """Writes a dict of all tensors and objects by key, as one file of ``torch.save``; see `FormatWriter`.

    The dict is flat: its keys are those of the checkpoint, including their dots, like a module's state dict.
    Tied tensors share a storage. ``torch.load`` reads the file with ``weights_only=True``, unless an object
    needs classes that a state dict does not have. One process writes the file.
    """

    name = "torch"
    last_file = _FILE
    stores_state_dicts = True

    def __init__(self, contents: Contents, options: WriteOptions) -> None:
        self._contents = contents
        self._piece_bytes = options.piece_bytes
        boxes = [
            (key, (0,) * len(shape), shape) for key, (_, shape) in contents.tensors.items() if 0 not in shape
        ]
        nbytes = sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in contents.tensors.values())
        self.units = [Unit(_FILE, boxes, nbytes)]
        self.notes = notes_of(self.name, contents)
        for key, value in contents.objects.items():
            archive_of(key, value, self.name)

    def write(self, unit: Unit, source: BoxSource, target: Storage) -> dict[str, Any]:
        """Writes the file; see `FormatWriter.write`."""
        tensors = {
            key: ArchiveTensor.box(source, key, dtype, (0,) * len(shape), shape, self._piece_bytes)
            for key, (dtype, shape) in self._contents.tensors.items()
        }
        aliases = {key: tensors[other] for key, other in self._contents.aliases.items()}
        with new_file(target, unit.name) as file:
            TorchArchive({**tensors, **aliases, **self._contents.objects}).write(file)
            return {"size": file.finish()}

    def commit(self, records: Mapping[str, dict[str, Any]], target: Storage) -> None:
        """Checks the file, which is the whole checkpoint; see `FormatWriter.commit`.

        Raises:
            StructureError: the file was not written.
            StorageError: the file is missing, or was cut.
        """
        check_units(target, self.units, records, lambda name, record: [(name, record["size"])])
