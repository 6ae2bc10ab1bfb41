"""The header of a rank's shard file: the parts that depend on the plan alone, and the other parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.format import (
    BLOCKS,
    DIGESTS,
    FORMAT_VERSION,
    PADDING,
    PAGE_BYTES,
    REFERENCES_VERSION,
    block_counts,
    box_name,
    bytes_digest,
    encode_entries,
    shard_header,
)
from shardproof.planning import LARGE_BYTES, RankPlan, Structure
from shardproof.saving.messages import Attempt

__all__ = [
    "LARGE_IN_PAGE",
    "Entries",
    "PreparedShard",
    "encode_chunks",
    "prepare_shard",
    "start_in_page",
]

LARGE_IN_PAGE = 1856
"""Byte of a page near which large chunks begin: half a page from the byte where allocators place large
tensors (0 or 64). A copy between addresses that differ by nearly a multiple of 4096 bytes is slow: processors
compare the low 12 bits of a load with those of earlier stores (4K aliasing: Intel 64 and IA-32 Architectures
Optimization Reference Manual). Most large chunks have whole pages, so all of one alignment begin at the same
byte of a page."""

_STEP = 64
"""Bytes; data begin at a multiple of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The entries of a shard's header, `@padding`, `@blocks` and `@digests` included."""

    encoded: bytes
    padding: int
    """Zero bytes after the chunks."""
    in_page: int
    """Byte of a page at which the data begin."""


def encode_chunks(
    names: Sequence[str], codes: Sequence[str], shapes: Sequence[Sequence[int]], byte_count: NDArray[Any]
) -> Entries:
    """The entries of a shard file with these chunks, in this order and without gaps.

    Args:
        names: names of n chunks.
        codes: safetensors codes of their dtypes.
        shapes: their shapes, in elements of those dtypes.
        byte_count: (n,) int64, their sizes in bytes.

    >>> encode_chunks(["w[0:3]"], ["U8"], [(3,)], np.array([3])).padding
    5
    """
    data_bytes = int(byte_count.sum())
    padding = -data_bytes % 8
    names, codes, shapes, counts = list(names), list(codes), list(shapes), byte_count.tolist()
    if padding:
        names.append(PADDING)
        codes.append("U8")
        shapes.append((padding,))
        counts.append(padding)
    for name, digests in ((BLOCKS, int(block_counts(byte_count).sum())), (DIGESTS, len(byte_count))):
        if digests or name == DIGESTS:
            names.append(name)
            codes.append("U64")
            shapes.append((digests, 2))
            counts.append(16 * digests)
    ends = np.cumsum(counts, dtype=np.int64)
    encoded = encode_entries(names, codes, shapes, ends - counts, np.array(counts, np.int64))
    return Entries(encoded, padding, start_in_page(byte_count))


def start_in_page(byte_count: NDArray[np.int64]) -> int:
    """The byte of a page at which data begin, so that most large chunks begin near `LARGE_IN_PAGE`.

    Args:
        byte_count: (n,) bytes of the chunks, in file order.

    Returns:
        A multiple of 64; 0 if no chunk is large.

    >>> start_in_page(np.array([512, 1 << 20])) + 512
    1856
    """
    is_large = byte_count >= LARGE_BYTES
    starts = (np.cumsum(byte_count) - byte_count)[is_large]
    steps = PAGE_BYTES // _STEP
    weights = np.bincount(starts // _STEP % steps, byte_count[is_large], steps)
    shifts, places = np.ogrid[:steps, :steps]
    away = np.abs((shifts + places - LARGE_IN_PAGE // _STEP + steps // 2) % steps - steps // 2)
    return int(np.argmax(np.maximum(steps // 3 - away, 0) @ weights)) * _STEP


@dataclass(frozen=True, slots=True, eq=False)
class PreparedShard:
    """The parts of a rank's shard that depend on the plan alone."""

    plan: RankPlan
    names: tuple[str, ...]
    """Names of the chunks' entries, in the order of `codes` and `shapes`."""
    codes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    entries: Entries
    """Entries of a file with all chunks."""
    tensors: msgspec.Raw
    """Encoded mapping of key to dtype and global shape, for the tensors of the file and the empty tensors
    that it declares."""
    data_bytes: int

    @property
    def is_written(self) -> bool:
        """True if the plan gives this rank a file."""
        return len(self.plan.piece) > 0 or len(self.plan.objects) > 0

    @property
    def padding(self) -> int:
        """Zero bytes after the chunks, in a file with all of them."""
        return self.entries.padding

    def entries_of(self, written: NDArray[np.bool_]) -> Entries:
        """The entries of a file with some of the chunks.

        Args:
            written: (chunks,) whether the file stores the chunk.
        """
        if written.all():
            return self.entries
        chosen = written.tolist()
        columns = (list(compress(column, chosen)) for column in (self.names, self.codes, self.shapes))
        names, codes, shapes = columns
        return encode_chunks(names, codes, shapes, self.plan.byte_count[written])  # type: ignore[arg-type]

    def header(
        self,
        attempt: Attempt,
        rank: int,
        objects: dict[str, bytes],
        entries: Entries | None = None,
        *,
        size: int = 0,
    ) -> bytes:
        """The whole header of the shard of one attempt.

        Args:
            attempt: see `Attempt`.
            rank: the rank that writes the file.
            objects: objects of the file, as JSON.
            entries: entries of the file; None: entries of all chunks.
            size: smallest size of the header in bytes.
        """
        entries = self.entries if entries is None else entries
        declared = {
            "version": REFERENCES_VERSION if attempt.base else FORMAT_VERSION,
            "attempt": attempt.id,
            "step": attempt.step,
            "time": attempt.time,
            "rank": rank,
            "world_size": attempt.world_size,
            "files": self.plan.files,
            "tensors": self.tensors,
            "aliases": self.plan.aliases,
            "objects": {key: msgspec.Raw(value) for key, value in objects.items()},
            "metadata": attempt.metadata,
        }
        if attempt.base:
            declared["base"] = attempt.base
        text = msgspec.json.encode(declared)
        metadata = {"shardproof": text.decode(), "digest": bytes_digest(text + entries.encoded)}
        return shard_header(entries.encoded, metadata, in_page=entries.in_page, size=size)


def prepare_shard(structure: Structure, plan: RankPlan) -> PreparedShard:
    """Names the chunks of a plan and encodes their entries."""
    table = structure.tensors()
    rows = structure.box_tensor[plan.piece].tolist()
    dtypes = {name: DTYPES[name] for name in set(table.dtypes)}
    boxes: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}  # few, because most cuts are alike
    names: list[str] = []
    codes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    offsets, sizes = plan.box_offsets.tolist(), plan.box_sizes.tolist()
    at = 0
    for row in rows:
        dtype, ndim = dtypes[table.dtypes[row]], len(table.shapes[row])
        box = *offsets[at : at + ndim], *sizes[at : at + ndim], dtype.parts
        named = boxes.get(box)
        if named is None:
            shape = box[ndim:] if dtype.parts > 1 else box[ndim:-1]
            named = boxes[box] = box_name(box[:ndim], box[ndim:-1]), shape
        names.append(table.keys[row] + named[0])
        codes.append(dtype.code)
        shapes.append(named[1])
        at += ndim
    declared = {table.keys[row]: (table.dtypes[row], table.shapes[row]) for row in np.unique(rows).tolist()}
    return PreparedShard(
        plan,
        tuple(names),
        tuple(codes),
        tuple(shapes),
        encode_chunks(names, codes, shapes, plan.byte_count),
        msgspec.Raw(msgspec.json.encode(declared | plan.empty)),
        int(plan.byte_count.sum()),
    )
