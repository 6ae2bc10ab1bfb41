"""The beginning of a step on one rank: what it takes to run it once more, here or in another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.rerun.kept import Beginning, Kept
from shardproof.rerun.byte_packing import pack, unpack
from shardproof.rerun.replay import ReplayableIterator
from shardproof.rerun.step_runs import Suspicion

__all__ = ["Iterators", "Start", "iterators_of"]

Iterators = tuple[ReplayableIterator[Any], ...]


@dataclass(frozen=True, slots=True)
class Start:
    """What a step began with."""

    iterators: Iterators
    beginning: Beginning | None
    """None for a step that is not validated, and so never runs again."""

    @classmethod
    def new(cls, iterators: Iterators, kept: Sequence[Kept], *, captured: bool) -> Start:
        """A step begins now, with data that comes next."""
        for iterator in iterators:
            iterator.advance(generators=captured)
        return cls(iterators, Beginning.of(kept) if captured else None)

    @classmethod
    def stored(
        cls, packed: torch.Tensor, iterators: Iterators, kept: Sequence[Kept]
    ) -> tuple[Start, Suspicion | None]:
        """A step begins as it did in the process that packed it.

        Raises:
            StructureError: it takes data from another number of iterators, or has other kept objects.
        """
        content = unpack(packed)
        microbatches, drawn = content["microbatches"], content["drawn"]
        if len(microbatches) != len(iterators):
            raise StructureError(
                f"the suspicious step took its data from {len(microbatches)} iterators, and should_run got "
                f"{len(iterators)}. Call it with as many as in the run before"
            )
        start = cls(iterators, Beginning(content["generators"], content["kept"]))
        for iterator, given, after in zip(iterators, microbatches, drawn, strict=True):
            iterator.load(given, after)
        start.again(kept)
        return start, content["suspicion"] and Suspicion(**content["suspicion"])

    def again(self, kept: Sequence[Kept]) -> None:
        """Put everything back to the beginning."""
        assert self.beginning is not None
        self.beginning.put_back(kept)
        for iterator in self.iterators:
            iterator.rewind()

    def pack(self, suspicion: Suspicion | None) -> torch.Tensor:
        """All of it as bytes, with the rejected result that is to be computed again.

        Returns:
            1-D, uint8.

        Raises:
            PlainDataError: a microbatch or a kept value is nothing that a checkpoint can hold.
        """
        assert self.beginning is not None
        content = {
            "microbatches": [list(iterator.microbatches) for iterator in self.iterators],
            "drawn": [list(iterator.generators) for iterator in self.iterators],
            "generators": self.beginning.generators,
            "kept": self.beginning.kept,
            "suspicion": None if suspicion is None else asdict(suspicion),
        }
        return pack(content, "the step's beginning")


def iterators_of(data: object) -> Iterators:
    """What `should_run` was given, as a tuple.

    Raises:
        TypeError: it holds something else.
    """
    found: Any = () if data is None else (data,) if isinstance(data, ReplayableIterator) else data
    if isinstance(found, Sequence):
        found = [one for one in found if one is not None]  # stages of a pipeline that take no data
    if not isinstance(found, list | tuple) or not all(isinstance(one, ReplayableIterator) for one in found):
        raise TypeError(
            f"should_run takes a ReplayableIterator, several in a list, or None, not {data!r:.80}: a step "
            "that runs again needs its microbatches again. Wrap it once, before the loop: "
            "ReplayableIterator(loader)"
        )
    return tuple(found)
