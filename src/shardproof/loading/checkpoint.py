"""One committed checkpoint, open for reading: no process group, no GPU, and only blocks that are needed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from types import EllipsisType, TracebackType
from typing import Any, SupportsIndex

import numpy as np
import torch

from shardproof.dtypes import DTYPES
from shardproof.errors import FormatError
from shardproof.format import MANIFEST_NAME, Manifest, check_size, locate_files, read_index, read_manifest
from shardproof.loading.block_reader import BlockDigests
from shardproof.loading.chunk_reader import Chunks
from shardproof.loading.destinations import Destination, DestinationWriter
from shardproof.loading.read_executor import read_chunks
from shardproof.planning import ChunkTable, ReadPlan, RequestedBoxes, plan_reads
from shardproof.state import Catalogue, decode_plain
from shardproof.storage import LocalStorage, Storage, StrOrBytesPath

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint", "read_plan"]

Index = SupportsIndex | slice | EllipsisType

_KEY, _KIND = operator.attrgetter("key"), operator.attrgetter("dtype", "shape")


def open_checkpoint(path: StrOrBytesPath) -> Checkpoint:
    """Opens a committed checkpoint for reading, in one process.

    Args:
        path: the folder that holds `manifest.json`.

    Raises:
        NotCommittedError: there is no manifest.
        FormatError: manifest or index are damaged.

    >>> import shardproof as sp, tempfile, torch
    >>> place = tempfile.mkdtemp() + "/ckpt"
    >>> _ = sp.save(place, {"w": torch.arange(12.0).reshape(4, 3), "note": "hi"})
    >>> with sp.open(place) as ckpt:
    ...     ckpt["w"][1:3, 0].tolist(), ckpt["note"], ckpt.shape("w")
    ([3.0, 6.0], 'hi', (4, 3))
    """
    return Checkpoint(LocalStorage(path))


class Checkpoint:
    """A committed checkpoint. Tensors are lazy (`StoredTensor`), plain values are as they were saved."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.manifest: Manifest = read_manifest(storage)
        self.table: ChunkTable = read_index(storage, self.manifest)
        self.files: list[tuple[Storage, str]] = locate_files(storage, self.manifest)
        """Storage and name of each shard file, in the order of the manifest's table."""
        self.blocks = BlockDigests(self.files, self.manifest, self.table)
        keys = map(_KEY, self.manifest.tensors)
        self._row = dict(zip(keys, range(len(self.manifest.tensors)), strict=True))
        self._sized: set[int] = set()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.storage.close()
        for storage in {id(storage): storage for storage, _ in self.files}.values():
            storage.close()

    @property
    def step(self) -> int | None:
        """The step that was given at save."""
        return self.manifest.step

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was given at save."""
        decoded = self._decoded(self.manifest.metadata)
        assert isinstance(decoded, dict)
        return decoded

    def keys(self) -> list[str]:
        """All keys, of tensors and of plain values, sorted. Keys of tied tensors are among them."""
        return sorted([*self._row, *self.manifest.aliases, *self.manifest.objects])

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._row or key in self.manifest.aliases or key in self.manifest.objects

    def __len__(self) -> int:
        return len(self._row) + len(self.manifest.aliases) + len(self.manifest.objects)

    def __getitem__(self, key: str) -> Any:
        """A `StoredTensor`, or the plain value.

        Raises:
            KeyError: neither is stored under this key.
        """
        if key in self.manifest.objects:
            return self._decoded(self.manifest.objects[key])
        return StoredTensor(self, key, self.row(key))

    def row(self, key: str) -> int:
        """Row of a tensor in the manifest's table; a tied tensor's is that of the key it is stored under."""
        return self.rows([key])[0]

    def rows(self, keys: Sequence[str]) -> list[int]:
        """Rows of tensors in the manifest's table, as `row`."""
        row_of, stored_as = self._row, self.manifest.aliases
        try:
            if stored_as:
                keys = [stored_as.get(key, key) for key in keys]
            return list(map(row_of.__getitem__, keys))
        except KeyError as error:
            raise KeyError(f"{self.storage.location} has no {error}; its keys are given by keys()") from None

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return self.manifest.tensors[self.row(key)].shape

    def dtype(self, key: str) -> str:
        """Torch's name of a tensor's dtype, for example "bfloat16"."""
        return self.manifest.tensors[self.row(key)].dtype

    def catalogue(self) -> Catalogue:
        """What this checkpoint holds, for binding a state to it."""
        tensors = dict(zip(self._row, map(_KIND, self.manifest.tensors), strict=True))
        tensors |= {alias: tensors[key] for alias, key in self.manifest.aliases.items()}
        return Catalogue(tensors, self.manifest.aliases, self.manifest.objects, self.manifest.world_size)

    def check_sizes(self, files: Iterable[int]) -> None:
        """Checks that shard files have their recorded sizes. Checks each file once.

        A load calls it first: it finds a missing or short file before it allocates memory for the file's
        chunks and before it overwrites any of the target.

        Args:
            files: rows of the manifest's table of files.

        Raises:
            StorageError: a file is missing or has another size.
        """
        for file in set(files) - self._sized:
            record = self.manifest.files[file]
            storage, name = self.files[file]
            advice = "Restore an older step; `shardproof verify` lists all damage"
            if record.folder:
                advice = (
                    f"{self.storage.location} was saved incrementally and has chunks in it, so it must stay "
                    f"beside it. {advice}"
                )
            check_size(storage, record, path=f"{storage.location}/{name}", advice=advice)
            self._sized.add(file)

    def _decoded(self, value: Any) -> Any:
        """A plain value. A tensor that it refers to is read once, however often it does."""
        return decode_plain(value, functools.cache(self._referenced))

    def _referenced(self, key: str) -> torch.Tensor:
        """A tensor that a plain value refers to."""
        if self.manifest.aliases.get(key, key) not in self._row:
            raise FormatError(
                f"{self.storage.location}: a plain value refers to the tensor {key!r}, which is not there",
                file=MANIFEST_NAME,
                key=key,
            )
        return StoredTensor(self, key, self.row(key)).read()


def read_plan(checkpoint: Checkpoint, plan: ReadPlan, destinations: Sequence[Destination]) -> int:
    """Reads and verifies the parts of a plan, and copies them to their destinations.

    Args:
        checkpoint: open for reading.
        plan: from `plan_reads`; its `want` is an index into `destinations`.
        destinations: of the wanted boxes.

    Returns:
        Bytes read.

    Raises:
        CorruptChunkError: bytes do not match their digest; destinations may be partly written.
        StorageError: a file is missing, short or unreadable.
    """
    manifest, table = checkpoint.manifest, checkpoint.table
    writer = DestinationWriter(manifest, table, plan, destinations)
    chunks = Chunks(checkpoint.files, manifest, table, np.unique(plan.chunk))
    chunks.narrow(writer.wanted, checkpoint.blocks)
    return read_chunks(chunks, writer)


class StoredTensor:
    """A tensor in a checkpoint, not read yet.

    Slicing reads, of each chunk that the box is in, the blocks of 256 KiB from the first byte that it needs
    to the last (with a step greater than 1, what it steps over too). Every byte that it returns is verified.
    """

    def __init__(self, checkpoint: Checkpoint, key: str, row: int) -> None:
        self._checkpoint = checkpoint
        self._row = row
        self.key = key
        record = checkpoint.manifest.tensors[row]
        self.shape: tuple[int, ...] = record.shape
        self.dtype: torch.dtype = getattr(torch, record.dtype)
        self.nbytes: int = DTYPES[record.dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, shape={self.shape}, dtype={self.dtype})"

    def read(self) -> torch.Tensor:
        """The whole tensor, every byte verified.

        Raises:
            CorruptChunkError: stored bytes do not match their digest.
        """
        return self._read([0] * len(self.shape), list(self.shape))

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Basic slicing, as torch: integers, slices with positive steps, one ellipsis.

        Raises:
            IndexError: too many indices, or an integer out of range.
            CorruptChunkError: stored bytes do not match their digest.
        """
        indices = self._expanded(index if isinstance(index, tuple) else (index,))
        offsets: list[int] = []
        sizes: list[int] = []
        steps: list[slice] = []
        for dim, (entry, extent) in enumerate(zip(indices, self.shape, strict=True)):
            if isinstance(entry, int):
                if not -extent <= entry < extent:
                    raise IndexError(
                        f"{self.key}: index {entry} is out of range for dimension {dim} of size {extent}"
                    )
                entry = slice(entry % extent, entry % extent + 1)
            if entry.step is not None and entry.step < 1:
                raise IndexError(f"{self.key}: a slice step must be positive, got {entry.step}")
            start, stop, step = entry.indices(extent)
            offsets.append(start)
            sizes.append(max(stop - start, 0))
            steps.append(slice(None, None, step))
        box = self._read(offsets, sizes)[tuple(steps)]
        scalar = tuple(0 if isinstance(entry, int) else slice(None) for entry in indices)
        return box[scalar]

    def _expanded(self, index: tuple[Index, ...]) -> list[int | slice]:
        """One entry for each dimension."""
        plain: list[int | slice] = []
        at = None
        for entry in index:
            if isinstance(entry, EllipsisType) and at is None:
                at = len(plain)
            elif isinstance(entry, slice):
                plain.append(entry)
            elif isinstance(entry, SupportsIndex) and not isinstance(entry, bool):
                plain.append(operator.index(entry))
            else:
                raise IndexError(
                    f"{self.key}: integers, slices and one ... can index a stored tensor, got {entry!r}"
                )
        if len(plain) > len(self.shape):
            raise IndexError(f"{self.key}: {len(plain)} indices for the shape {self.shape}")
        at = len(plain) if at is None else at
        filler = [slice(None)] * (len(self.shape) - len(plain))
        return [*plain[:at], *filler, *plain[at:]]

    def _read(self, offsets: list[int], sizes: list[int]) -> torch.Tensor:
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype, device="cpu")
        checkpoint = self._checkpoint
        manifest, table = checkpoint.manifest, checkpoint.table
        wanted = RequestedBoxes(np.array([self._row]), np.array(offsets, np.int64), np.array(sizes, np.int64))
        plan = plan_reads(manifest.tensors, table, wanted)
        checkpoint.check_sizes(table.file[plan.chunk].tolist())
        result = torch.empty(sizes, dtype=self.dtype, device="cpu")
        read_plan(checkpoint, plan, [Destination.of(self.key, manifest.tensors[self._row].dtype, result)])
        return result
