"""The work of one process: reads and writes units of a conversion, verifies written ones, and uploads files.

The values of a unit are read from the stored checkpoint, moved, cast and hashed (`MappedSource`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
import xxhash

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import foreign_of
from shardproof.engine.geometry import Boxes, overlapping_pairs
from shardproof.engine.loading import Checkpoint, StoredTensor, open_storage
from shardproof.engine.state import as_bytes, register_by_name
from shardproof.errors import CorruptChunkError
from shardproof.formats.conversion.destination import BucketDestination
from shardproof.formats.conversion.key_maps import MappedTensor, Move
from shardproof.formats.conversion.plan import (
    ConversionPlan,
    ConversionRequest,
    piece_bytes,
    plan_conversion,
)
from shardproof.formats.conversion.work_folder import HashedBox, UnitRecord, WorkFolder
from shardproof.workers import batches

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offsets and sizes."""
_Box = tuple[tuple[int, ...], tuple[int, ...]]
_SMALL_BYTES = 1 << 20
"""Larger boxes are not read ahead: planning takes a small part of their time."""
_FEW_MOVES = 64
"""Up to this many moves, comparing each with a box takes less time than a search."""


def box_digest(values: torch.Tensor) -> str:
    """Digest of the bytes of a dense tensor in host memory."""
    return xxhash.xxh3_128_hexdigest(as_bytes(values).numpy().data)


class MappedSource:
    """Gives the boxes of written tensors; see `shardproof.formats.BoxSource`.

    Args:
        checkpoint: the stored one, open for reading.
        tensors: by key, the written tensors.
        expected: key, offsets and sizes of the boxes that will be read, in their order. Small ones are read
            ahead, several at once. Boxes of keys that are not in `tensors` are ignored: the writer has them.
        batch_bytes: bytes that are read ahead, at most.
        on_bytes: called with the bytes of each box that is read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, MappedTensor],
        expected: Sequence[Box] = (),
        batch_bytes: int = 0,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors
        self._on_bytes = on_bytes
        self.boxes: list[HashedBox] = []
        """The boxes that were read, and those that the writer made."""
        small = [box for box in expected if box[0] in tensors and self._nbytes(box) <= _SMALL_BYTES]
        self._batch_of = {box: batch for batch in batches(small, self._nbytes, batch_bytes) for box in batch}
        self._ahead: dict[Box, torch.Tensor] = {}
        """Boxes that were read ahead and not requested yet."""
        self._moves: dict[str, Boxes] = {}
        """Boxes of the moves of tensors that have many."""

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Reads a box of a written tensor and records its digest."""
        box = tuple(offsets), tuple(sizes)
        values = self._read_ahead((key, *box))
        if values is None:
            values = self._read(key, box)
        self.note(key, *box, values)
        return values

    def note(self, key: str, offsets: Sequence[int], sizes: Sequence[int], values: torch.Tensor) -> None:
        """Records the digest of a box; see `shardproof.formats.BoxSource`."""
        self.boxes.append(HashedBox(key, tuple(offsets), tuple(sizes), box_digest(values)))
        self._on_bytes(values.nbytes)

    def _nbytes(self, box: Box) -> int:
        return prod(box[2]) * DTYPES[self._tensors[box[0]].dtype].itemsize

    def _read_ahead(self, box: Box) -> torch.Tensor | None:
        """A small box that was expected, read with the others of its batch; None for any other."""
        if box not in self._ahead and box in self._batch_of:
            batch = self._batch_of[box]
            moves: dict[Box, Move] = {}  # of the boxes that one move fills, without a permutation or zeros
            for one in batch:
                match self._tensors[one[0]].moves:
                    case [Move(key=str()) as move] if (move.offsets, move.sizes) == one[1:]:
                        if 0 not in one[2] and not move.axes:
                            moves[one] = move
            stored = [(move.key or "", move.source_offsets, move.source_sizes) for move in moves.values()]
            read = self._checkpoint.read_boxes(stored) if stored else []
            for one, values in zip(moves, read, strict=True):
                self._ahead[one] = values.reshape(one[2]).to(getattr(torch, self._tensors[one[0]].dtype))
            for one in batch:
                self._batch_of.pop(one, None)  # a box of a tied tensor may be expected twice
        return self._ahead.pop(box, None)

    def _read(self, key: str, box: _Box) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self._tensors[key].dtype)
        moves = self._near(key, box) if 0 not in box[1] else ()
        parts = [(move, *shared) for move in moves if (shared := _shared(box, move))]
        if len(parts) == 1 and parts[0][2] == box[1]:
            return self._moved(*parts[0]).to(dtype).contiguous()
        values = torch.zeros(box[1], dtype=dtype, device="cpu")
        for move, low, extent in parts:
            inside = tuple(a - o for a, o in zip(low, box[0], strict=True))
            values[_slices(inside, extent)].copy_(self._moved(move, low, extent))
        return values

    def _near(self, key: str, box: _Box) -> Iterable[Move]:
        """The moves that fill a part of a box, and perhaps other moves."""
        moves = self._tensors[key].moves
        if len(moves) <= _FEW_MOVES:
            return moves
        if key not in self._moves:
            self._moves[key] = Boxes.of(*((move.offsets, move.sizes) for move in moves))
        _, rows = overlapping_pairs(Boxes.of(box), self._moves[key])
        return [moves[row] for row in rows.tolist()]

    def _moved(self, move: Move, low: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """The part of a move that fills a box of the written tensor."""
        if move.key is None:
            return torch.zeros(sizes, dtype=torch.uint8, device="cpu")
        stored = self._checkpoint[move.key]
        assert isinstance(stored, StoredTensor)
        inside = tuple(a - o for a, o in zip(low, move.offsets, strict=True))
        source = _source_box(move, inside, sizes)
        if source is not None:
            return _permuted(stored[_slices(*source)], move).reshape(sizes)
        whole = _permuted(stored[_slices(move.source_offsets, move.source_sizes)], move).reshape(move.sizes)
        return whole[_slices(inside, sizes)]


def _permuted(values: torch.Tensor, move: Move) -> torch.Tensor:
    return values.permute(move.axes) if move.axes else values


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def _shared(box: _Box, move: Move) -> _Box | None:
    """The intersection of a box and the box that a move fills; None if it is empty."""
    low = tuple(map(max, box[0], move.offsets))
    high = tuple(
        min(a + m, b + n) for a, m, b, n in zip(box[0], box[1], move.offsets, move.sizes, strict=True)
    )
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    return (low, sizes) if all(size > 0 for size in sizes) else None


def _source_box(move: Move, inside: tuple[int, ...], sizes: tuple[int, ...]) -> _Box | None:
    """The box of the stored tensor that holds a part of a move.

    None if the part is not a box there: the move changes the shape by more than axes of size 1.
    """
    if sizes == move.sizes:
        return move.source_offsets, move.source_sizes
    long = [dim for dim, size in enumerate(move.sizes) if size > 1]
    order = move.axes or range(len(move.source_sizes))
    source_long = [dim for dim in order if move.source_sizes[dim] > 1]
    if [move.sizes[dim] for dim in long] != [move.source_sizes[dim] for dim in source_long]:
        return None
    offsets, extents = list(move.source_offsets), list(move.source_sizes)
    for dim, source_dim in zip(long, source_long, strict=True):
        offsets[source_dim] += inside[dim]
        extents[source_dim] = sizes[dim]
    assert prod(extents) == prod(sizes)
    return tuple(offsets), tuple(extents)


_READS = 4
"""Reads in flight of a written checkpoint. It was written past the page cache, and a disk serves several
reads faster than one (benchmarks/interop.py)."""


class ConversionWork:
    """One process's part of a conversion. The constructor opens the source and plans.

    Raises:
        StructureError: the destination is the name of a file, and does not fit the format or the plan.
    """

    def __init__(self, request: ConversionRequest) -> None:
        for name in request.register:
            register_by_name(name)
        self.request = request
        self.on_bytes: Callable[[int], None] = lambda count: None
        """Called with the bytes that were read since the last call."""
        self.folder = WorkFolder(request.destination, request.temporary)
        self.folder.destination.check_format(request.to)
        self.checkpoint = open_storage(
            foreign_of(request.source),
            format=request.format,
            trust_pickle=request.trust_pickle,
            warn=False,
        )
        self.plan: ConversionPlan = plan_conversion(self.checkpoint, request)
        self.folder.destination.check_files(len(self.plan.writer.units))
        self._written: Checkpoint | None = None
        self._memory: torch.Tensor | None = None
        """Memory for the boxes that are read again."""

    def close(self) -> None:
        """Closes the files that reading opened."""
        self.checkpoint.close()
        if self._written is not None:
            self._written.close()

    def write(self, unit: int) -> None:
        """Writes a unit and publishes its record.

        Raises:
            ShardproofError: the source is damaged, or the work folder fails or is not shared.
        """
        self.folder.check_is_shared()
        item = self.plan.writer.units[unit]
        source = MappedSource(
            self.checkpoint, self.plan.tensors, item.boxes, piece_bytes(self.request), self.on_bytes
        )
        written = self.plan.writer.write(item, source, self.folder.files)
        self.folder.add(UnitRecord(item.name, written, source.boxes, item.nbytes))

    def verify(self, boxes: Sequence[HashedBox]) -> int:
        """Reads boxes of the written checkpoint, compares their digests, and returns their bytes.

        Raises:
            CorruptChunkError: the bytes are not those that were written.
            ShardproofError: the written checkpoint cannot be read, or the work folder is not shared.
        """
        if self._written is None:
            self.folder.check_is_shared()
            self._written = open_storage(
                self.folder.files, trust_pickle=self.request.trust_pickle, warn=False
            )
        written, done = self._written, 0

        def nbytes(box: Box) -> int:
            return prod(box[2]) * DTYPES[written.dtype(box[0])].itemsize

        if self._memory is None:
            self._memory = torch.empty(piece_bytes(self.request), dtype=torch.uint8, device="cpu")
        digests = {(box.key, box.offsets, box.sizes): box.digest for box in boxes if 0 not in box.sizes}
        for batch in batches(list(digests), nbytes, piece_bytes(self.request)):
            read = written.read_boxes(batch, threads=_READS, memory=self._memory)
            for box, values in zip(batch, read, strict=True):
                if (found := box_digest(values)) != digests[box]:
                    raise CorruptChunkError(
                        f"{self.folder.files.location}: the box of {box[0]!r} at {list(box[1])}, sizes "
                        f"{list(box[2])}, has digest {found}, expected {digests[box]}: it was not stored as "
                        "it was written. Nothing was published: check the disk and convert again",
                        key=box[0],
                    )
                done += values.nbytes
                self.on_bytes(values.nbytes)
        return done

    def upload(self, names: Sequence[str]) -> None:
        """Uploads files of the new checkpoint: a large one, or some small ones.

        Raises:
            ShardproofError: the destination fails or has other bytes, or the work folder is not shared.
        """
        self.folder.check_is_shared()
        destination = self.folder.destination
        assert isinstance(destination, BucketDestination)
        destination.upload(self.folder.files, names, self.on_bytes)
