"""One committed checkpoint, open for reading. It needs no process group and no GPU."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import EllipsisType, TracebackType
from typing import Any, Protocol, Self, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

from shardproof._utils.humanize import counted, gigabytes, nearest
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import NATIVE, is_paths_key, paths_in, tensors_in_values
from shardproof.engine.format import (
    MANIFEST_NAME,
    BlockDigests,
    FileRecord,
    Manifest,
    TensorRecord,
    check_sizes,
    locate_files,
    read_index,
    read_manifest,
    tensor_bytes,
)
from shardproof.engine.loading.chunk_reader import Chunks
from shardproof.engine.loading.destinations import Destination, DestinationWriter
from shardproof.engine.loading.read_executor import ChunkReads
from shardproof.engine.planning import OWN_ADVICE, ChunkTable, ReadPlan, RequestedBoxes, plan_reads
from shardproof.engine.state import Catalogue, decode_plain
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError

OPENED_FIRST = 32
"""Files that a load opens before it overwrites anything. A storage keeps at least as many open, unless the
process may have few descriptors."""

_MOST_COMPARED = 5000
"""Most keys among which an error searches for similar ones: a search among 10,000 takes a second."""

Index = SupportsIndex | slice | EllipsisType

_KEY, _KIND = operator.attrgetter("key"), operator.attrgetter("dtype", "shape")


class Reads(Protocol):
    """The planned reads of some chunks, which `run` executes."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        ...

    def run(self, *, threads: int | None, on_bytes: Callable[[int], None] | None) -> int:
        """Reads and verifies the chunks, and fills the destinations. Returns the bytes read.

        Args:
            threads: reads in flight; None: as many as the storage and the processors need.
            on_bytes: called with the bytes read since the previous call, from any thread.

        Raises:
            CorruptChunkError: bytes do not match their digest; destinations may be partly written.
            FormatError, StorageError: a file is damaged, missing, short or unreadable.
        """
        ...


class Checkpoint(ABC):
    """A committed checkpoint. Tensors are lazy (`StoredTensor`), plain values are as they were saved.

    `shardproof.open` makes one. Its class depends on the format, and its interface does not.
    """

    format: str
    """Name of its format."""
    location: str
    """The path, for messages."""
    attempt: str
    """Equal on all ranks that see the same checkpoint."""
    step: int | None
    """The training step, where the checkpoint records it."""
    world_size: int
    """Ranks that saved, where the checkpoint records it."""
    tensors: Sequence[TensorRecord]
    """Key, dtype and shape of each stored tensor."""
    aliases: Mapping[str, str]
    """Key of a tied tensor to the key that it is stored under."""
    table: ChunkTable
    """All stored chunks. Its rows name tensors by their place in `tensors`."""
    objects: Mapping[str, Any]
    """Key of each plain value to its encoded data."""
    tiling_advice = OWN_ADVICE
    """Advice to the user if the chunks of a tensor do not tile it."""

    def _index(self) -> None:
        """Prepares the search by key; a constructor calls it when it has set `tensors`."""
        self._row = dict(zip(map(_KEY, self.tensors), range(len(self.tensors)), strict=True))

    @functools.cached_property
    def _keys(self) -> frozenset[str]:
        inner = self.inner_tensors(self.objects, self._row)
        return frozenset([*self._row, *self.aliases, *self.objects]) - inner

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step={self.step}"
        nbytes = gigabytes(sum(map(tensor_bytes, self.tensors)))
        return (
            f"<{type(self).__name__} {self.location!r}, format={self.format!r}{step}, "
            f"{counted(len(self.tensors) + len(self.aliases), 'tensor')} of {nbytes}, "
            f"{counted(len(self.objects), 'plain value')}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was given at save."""
        return {}

    @property
    def provenance(self) -> dict[str, Any]:
        """The origin of the save: program, git commit, versions; empty if it is not recorded.

        docs/format.md lists the members.
        """
        return {}

    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """Recorded paths of keys in the nested state dict that was saved. Other keys have no entry."""
        recorded = [self[key] for key in self.objects if is_paths_key(key)]
        return {key: path for nested in recorded for key, path in paths_in(nested)}

    def inner_tensors(self, objects: Mapping[str, Any], keys: Iterable[str]) -> set[str]:
        """Of keys of tensors, those that hold the bytes of a plain value; see `tensors_in_values`.

        Args:
            objects: encoded plain values by key, of this checkpoint or renamed.
            keys: keys of tensors, of this checkpoint or renamed.
        """
        return tensors_in_values(self.format, objects, keys)

    @abstractmethod
    def close(self) -> None:
        """Closes the files that reading opened."""

    @abstractmethod
    def check_files(self, rows: NDArray[np.int64] | None = None) -> None:
        """Checks that files have their recorded sizes. Checks each file once.

        A load calls it before it overwrites any of the target. Without `include` and `exclude`, it calls it
        before it allocates memory, too.

        Args:
            rows: rows of the chunk table whose files are checked; None for all files.

        Raises:
            StorageError: a file is missing or has another size.
        """

    @abstractmethod
    def open_files(self, rows: NDArray[np.int64]) -> None:
        """Opens the first files of some rows of the chunk table, as many as stay open.

        A load calls it before it overwrites anything, so that a missing right is found first. Files of a
        storage that the operating system does not cache are not opened.

        Raises:
            StorageError: a file cannot be opened.
        """

    @abstractmethod
    def reads(self, writer: DestinationWriter, rows: NDArray[np.int64]) -> Reads:
        """Plans to read some chunks.

        Args:
            writer: where the parts of the chunks go.
            rows: rows of the chunk table, distinct.
        """

    def fill(self, plan: ReadPlan, destinations: Sequence[Destination], *, threads: int = 1) -> int:
        """Reads and verifies the parts of a plan, and fills their destinations.

        Args:
            plan: from `plan_reads`; its `requested` is an index into `destinations`.
            destinations: destinations of the wanted boxes.
            threads: reads in flight; with 1, this thread's.

        Returns:
            Bytes read.

        Raises:
            CorruptChunkError, FormatError, StorageError: as `Reads.run`.
        """
        writer = DestinationWriter(self.tensors, self.table, plan, destinations)
        reads = self.reads(writer, np.unique(plan.chunk))
        return reads.run(threads=threads, on_bytes=None)

    def read_boxes(
        self,
        boxes: Sequence[tuple[str, Sequence[int], Sequence[int]]],
        *,
        threads: int = 1,
        memory: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Reads boxes of tensors in one plan, which is faster than separate reads of small boxes.

        Args:
            boxes: key, offsets and sizes of each; no size is 0.
            threads: reads in flight; with 1, this thread's.
            memory: (n,) uint8 in host memory, at an address that is a multiple of 64. Boxes are views of it
                until it is full. Reused memory is faster than new pages.

        Returns:
            The boxes, dense and in host memory.

        Raises:
            KeyError: no tensor has a key.
            CorruptChunkError, FormatError, StorageError, TilingError: as for `StoredTensor`.
        """
        rows = self.rows([key for key, _, _ in boxes])
        wanted = RequestedBoxes(
            np.array(rows, np.int64),
            np.array([at for _, offsets, _ in boxes for at in offsets], np.int64),
            np.array([size for _, _, sizes in boxes for size in sizes], np.int64),
        )
        plan = plan_reads(self.tensors, self.table, wanted, advice=self.tiling_advice)
        self.check_files(np.unique(plan.chunk))
        destinations, used = [], 0
        for row, (key, _, sizes) in zip(rows, boxes, strict=True):
            name = self.tensors[row].dtype
            end = used + prod(sizes) * DTYPES[name].itemsize
            if memory is not None and end <= len(memory):
                view = memory[used:end].view(getattr(torch, name)).view(tuple(sizes))
                used = -(-end // 64) * 64
            else:
                view = torch.empty(tuple(sizes), dtype=getattr(torch, name), device="cpu")
            destinations.append(Destination.of(key, name, view))
        self.fill(plan, destinations, threads=threads)
        return [destination.view for destination in destinations]

    def keys(self) -> list[str]:
        """All keys, of tensors and of plain values, sorted. Keys of tied tensors are among them.

        Tensors that hold the bytes of a plain value (an array, bytes, a long text or list) are not: the
        value has a key.
        """
        return sorted(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: str) -> Any:
        """A `StoredTensor`, or the plain value.

        Raises:
            KeyError: neither is stored under this key.
        """
        if key in self.objects:
            return self.decoded(self.objects[key])
        return StoredTensor(self, key, self.row(key))

    def row(self, key: str) -> int:
        """Row of a tensor in `tensors`. A tied tensor has the row of the key under which it is stored."""
        return self.rows([key])[0]

    def rows(self, keys: Sequence[str]) -> list[int]:
        """Rows of tensors in `tensors`, as `row`."""
        row_of, stored_as = self._row, self.aliases
        try:
            if stored_as:
                keys = [stored_as.get(key, key) for key in keys]
            return list(map(row_of.__getitem__, keys))
        except KeyError as error:
            raise self._no_tensor(error.args[0]) from None

    def _no_tensor(self, key: str) -> KeyError:
        """The error of a key that no tensor has. It names similar keys."""
        if key in self.objects:
            return KeyError(
                f"{self.location}: {key!r} is a plain value and no tensor: checkpoint[key] has it"
            )
        near = nearest(key, self._keys) if len(self._keys) <= _MOST_COMPARED else []
        advice = f"near it: {', '.join(near)}" if near else "keys() lists its keys"
        return KeyError(f"{self.location} has no {key!r}; {advice}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return self.tensors[self.row(key)].shape

    def dtype(self, key: str) -> str:
        """Torch's name of a tensor's dtype, for example "bfloat16"."""
        return self.tensors[self.row(key)].dtype

    def catalogue(self) -> Catalogue:
        """The contents of this checkpoint, to bind a state to it."""
        tensors = dict(zip(self._row, map(_KIND, self.tensors), strict=True))
        tensors |= {alias: tensors[key] for alias, key in self.aliases.items()}
        return Catalogue(tensors, self.aliases, self.objects, self.world_size, lambda: self.paths)

    def decoded(self, value: Any) -> Any:
        """Decodes a value of `objects`, or a part of one. A tensor that it refers to is read once."""
        return decode_plain(value, functools.cache(self._referenced))

    def _referenced(self, key: str) -> torch.Tensor:
        """A tensor that a plain value refers to."""
        if self.aliases.get(key, key) not in self._row:
            raise FormatError(
                f"{self.location}: a plain value refers to the tensor {key!r}, which the checkpoint lacks",
                file=MANIFEST_NAME,
                key=key,
            )
        return StoredTensor(self, key, self.row(key)).read()


class NativeCheckpoint(Checkpoint):
    """A checkpoint of shardproof's own format.

    Raises:
        NotCommittedError: there is no manifest.
        FormatError: manifest or index are damaged.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.format, self.location = NATIVE, storage.location
        self.manifest: Manifest = read_manifest(storage)
        self.attempt, self.step = self.manifest.attempt, self.manifest.step
        self.world_size = self.manifest.world_size
        self.tensors, self.aliases = self.manifest.tensors, self.manifest.aliases
        self.objects = self.manifest.objects
        self.table = read_index(storage, self.manifest)
        self.files: list[tuple[Storage, str]] = locate_files(storage, self.manifest)
        """Storage and name of each shard file, in the order of the manifest's table."""
        self.blocks = BlockDigests(self.files, self.manifest, self.table)
        self._sized: set[int] = set()
        self._index()

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.storage.close()
        for storage in {id(storage): storage for storage, _ in self.files}.values():
            storage.close()

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that was given at save."""
        decoded = self.decoded(self.manifest.metadata)
        assert isinstance(decoded, dict)
        return decoded

    @property
    def provenance(self) -> dict[str, Any]:
        """The origin of the save; see `Checkpoint.provenance`."""
        return dict(self.manifest.provenance)

    def check_files(self, rows: NDArray[np.int64] | None = None) -> None:
        """Checks that shard files have their recorded sizes; see `Checkpoint.check_files`."""

        def advice(record: FileRecord) -> str:
            restore = (
                f"Rank {record.rank} wrote it. Restore an older step; `shardproof verify` lists all damage"
            )
            if not record.folder:
                return restore
            return (
                f"{self.location} was saved incrementally and has chunks in it, so it must stay beside it. "
                f"{restore}"
            )

        files = range(len(self.files)) if rows is None else self.table.file[rows].tolist()
        unchecked = sorted(set(files) - self._sized)
        check_sizes([(self.files[file][0], self.manifest.files[file]) for file in unchecked], advice)
        self._sized.update(unchecked)

    def open_files(self, rows: NDArray[np.int64]) -> None:
        """Opens the first shard files of some chunks; see `Checkpoint.open_files`."""
        for file in np.unique(self.table.file[rows])[:OPENED_FIRST].tolist():
            open_once(*self.files[file])

    def bypass_cache(self) -> None:
        """Reads go past the page cache from here on, where the storage can."""
        self.files[:] = [(storage.past_cache(), name) for storage, name in self.files]

    def reads(self, writer: DestinationWriter, rows: NDArray[np.int64]) -> Reads:
        """Plans to read some chunks, reduced to the blocks that the destinations need."""
        chunks = Chunks(self.files, self.manifest, self.table, rows)
        chunks.narrow(writer.wanted, self.blocks)
        return ChunkReads(chunks, writer)


def open_once(storage: Storage, name: str) -> None:
    """Opens a file in a folder, and reads none of its bytes. Other storages have no open files."""
    if storage.path is not None:
        storage.read_into(name, 0, memoryview(bytearray()))


class StoredTensor:
    """A tensor in a checkpoint, not read yet.

    A slice reads only the chunks that it overlaps. Of each such chunk it reads the blocks of 256 KiB from the
    first needed byte to the last. So a step greater than 1 also reads the elements that it skips. Every
    returned byte is verified.
    """

    def __init__(self, checkpoint: Checkpoint, key: str, row: int) -> None:
        self._checkpoint = checkpoint
        self._row = row
        self.key = key
        record = checkpoint.tensors[row]
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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The whole tensor as a numpy array; numpy calls it.

        Raises:
            TypeError: numpy has no such dtype.
            ValueError: `copy` is False.
            CorruptChunkError: stored bytes do not match their digest.
        """
        if copy is False:
            raise ValueError(
                f"{self.key} is read from a checkpoint, which is a copy: copy=False is not possible"
            )
        try:
            torch.empty(0, dtype=self.dtype, device="cpu").numpy()
        except TypeError:
            raise TypeError(
                f"numpy has no {self.dtype}, the dtype of {self.key}: .read() returns it as a torch.Tensor, "
                "which .float() converts"
            ) from None
        return np.asarray(self.read().numpy(), dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """The whole tensor, every byte verified, in the protocol of `torch.as_tensor` and `torch.tensor`."""
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        """The device of `__dlpack__`: host memory."""
        return torch.empty(0, dtype=torch.uint8, device="cpu").__dlpack_device__()

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
        (result,) = self._checkpoint.read_boxes([(self.key, offsets, sizes)])
        return result
