"""The header of a rank's shard file: the parts that depend only on the plan, and the other parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardproof.dtypes import DTYPES
from shardproof.format import (
    FORMAT_VERSION,
    REFERENCES_VERSION,
    Declared,
    Entries,
    box_name,
    declared_header,
    encode_chunks,
)
from shardproof.planning import RankPlan, Structure
from shardproof.saving.messages import Attempt

__all__ = ["PreparedShard", "prepare_shard"]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedShard:
    """The parts of a rank's shard that depend only on the plan."""

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

    def entries_of(self, written: NDArray[np.bool_]) -> Entries:
        """The entries of a file with some of the chunks: those where `written`, (chunks,), is True."""
        if written.all():
            return self.entries
        chosen = written.tolist()
        columns = (list(compress(column, chosen)) for column in (self.names, self.codes, self.shapes))
        names, codes, shapes = columns
        return encode_chunks(names, codes, shapes, self.plan.byte_count[written])  # type: ignore[arg-type]

    def header(
        self, attempt: Attempt, rank: int, objects: dict[str, bytes], entries: Entries, *, size: int = 0
    ) -> bytes:
        """The whole header of the shard of one attempt, padded to at least `size` bytes.

        `objects` are those of the file, as JSON.
        """
        declared = Declared(
            version=REFERENCES_VERSION if attempt.base else FORMAT_VERSION,
            attempt=attempt.id,
            step=attempt.step,
            time=attempt.time,
            rank=rank,
            world_size=attempt.world_size,
            files=self.plan.files,
            tensors=cast(Any, self.tensors),
            aliases=self.plan.aliases,
            objects={key: msgspec.Raw(value) for key, value in objects.items()},
            metadata=attempt.metadata,
            base=attempt.base,
        )
        return declared_header(declared, entries, size=size)


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
