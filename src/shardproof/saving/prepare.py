"""What a rank derives from its plan once and uses at every save: the lasting parts of its shard's header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shardproof.dtypes import DTYPES
from shardproof.format import FORMAT_VERSION, bytes_digest, chunk_name, encode_entries, shard_header
from shardproof.planning import RankPlan, Structure

__all__ = ["Attempt", "PreparedShard", "prepare_shard"]


class Attempt(msgspec.Struct, frozen=True):
    """One try at saving, as the leader named it; the same on all ranks."""

    id: str
    time: float
    """Seconds since 1970."""
    step: int | None
    world_size: int
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedShard:
    """The parts of a rank's shard that do not change while the plan holds."""

    plan: RankPlan
    entries: bytes
    """Encoded safetensors entries, `@padding` and `@digests` included."""
    padding: int
    """Zero bytes before `@digests`."""
    tensors: msgspec.Raw
    """Encoded key to dtype and global shape, of what the file holds and of what it declares as empty."""
    data_bytes: int

    @property
    def is_written(self) -> bool:
        """Whether this rank writes a file at all."""
        return len(self.plan.piece) > 0 or len(self.plan.objects) > 0

    def header(self, attempt: Attempt, rank: int, objects: dict[str, bytes]) -> bytes:
        """The whole header of the shard of one attempt; `objects` are those it stores, as JSON."""
        declared = {
            "version": FORMAT_VERSION,
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
        text = msgspec.json.encode(declared)
        return shard_header(
            self.entries, {"shardproof": text.decode(), "digest": bytes_digest(text + self.entries)}
        )


def prepare_shard(structure: Structure, plan: RankPlan) -> PreparedShard:
    """Names the chunks of a plan and encodes their entries."""
    table = structure.tensors()
    rows = structure.box_tensor[plan.piece].tolist()
    names, codes, shapes = [], [], []
    offsets, sizes = plan.box_offsets.tolist(), plan.box_sizes.tolist()
    at = 0
    for row in rows:
        key, dtype = table.keys[row], DTYPES[table.dtypes[row]]
        ndim = len(table.shapes[row])
        shape = tuple(sizes[at : at + ndim])
        names.append(chunk_name(key, offsets[at : at + ndim], shape))
        codes.append(dtype.code)
        shapes.append((*shape, dtype.parts) if dtype.parts > 1 else shape)
        at += ndim
    data_bytes = int(plan.byte_count.sum())
    padding = -data_bytes % 8
    starts, counts = plan.byte_start, plan.byte_count
    if padding:
        names.append("@padding")
        codes.append("U8")
        shapes.append((padding,))
        starts, counts = np.append(starts, data_bytes), np.append(counts, padding)
    names.append("@digests")
    codes.append("U64")
    shapes.append((len(rows), 2))
    starts, counts = np.append(starts, data_bytes + padding), np.append(counts, 16 * len(rows))
    declared = {table.keys[row]: (table.dtypes[row], table.shapes[row]) for row in sorted(set(rows))}
    return PreparedShard(
        plan,
        encode_entries(names, codes, shapes, starts, counts),
        padding,
        msgspec.Raw(msgspec.json.encode(declared | plan.empty)),
        data_bytes,
    )
