"""The start of a step on one rank: data, generators and buffers, from which the step can run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from shardproof.errors import StructureError
from shardproof.rerun.byte_tensor import pack, unpack
from shardproof.rerun.replay import ReplayableIterator
from shardproof.rerun.step_run import Suspicion
from shardproof.state import RandomState

__all__ = ["BufferState", "Iterators", "Kept", "ProcessState", "StepStart", "iterators_of"]


class Kept(Protocol):
    """Something that a step changes, and that is put back for a rerun."""

    def save(self) -> Any:
        """What to put back: plain data and tensors, in dicts, lists and tuples. It must not change later."""

    def restore(self, saved: Any) -> None:
        """Put back what `save` answered, also in a process that was started later."""


class BufferState:
    """The buffers of a module, which a forward pass may change (running statistics, counters).

    Args:
        module: any module; its buffers are copied at the beginning of each step.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> kept = BufferState(norm)
    >>> saved = kept.save()
    >>> _ = norm(torch.randn(4, 2))
    >>> kept.restore(saved)
    >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
    ([0.0, 0.0], 0)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def save(self) -> dict[str, torch.Tensor]:
        """A copy of every buffer, by name."""
        return {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        """Write the copies back.

        Raises:
            StructureError: the module has other buffers than the one that was saved.
        """
        buffers = dict(self._module.named_buffers())
        if {name: buffer.shape for name, buffer in buffers.items()} != {
            name: copy.shape for name, copy in saved.items()
        }:
            raise StructureError(
                "the buffers that the suspicious step began with are not those of the module now: expected "
                f"{_shapes(buffers)}, found {_shapes(saved)}. Resume with the module as it was"
            )
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(saved[name])


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a step began with, but for its data."""

    generators: dict[str, Any]
    """The generators of the process, as `RandomState` describes them."""
    kept: list[Any]
    """What each of the kept objects saved."""

    @classmethod
    def of(cls, kept: Iterable[Kept]) -> ProcessState:
        """Now is the beginning."""
        return cls(RandomState().state_dict(), [one.save() for one in kept])

    def put_back(self, kept: Sequence[Kept]) -> None:
        """Everything as it was.

        Raises:
            StructureError: it was taken of another number of kept objects.
        """
        if len(kept) != len(self.kept):
            raise StructureError(
                f"the suspicious step began with {len(self.kept)} kept objects, and the machine has "
                f"{len(kept)}. Make it with the same `kept` as in the run before"
            )
        for one, saved in zip(kept, self.kept, strict=True):
            one.restore(saved)
        RandomState().load_state_dict(self.generators)


def _shapes(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "none"


Iterators = tuple[ReplayableIterator[Any], ...]


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a step began with."""

    iterators: Iterators
    beginning: ProcessState | None
    """None for a step that is not validated, and so never runs again."""

    @classmethod
    def new(cls, iterators: Iterators, kept: Sequence[Kept], *, captured: bool) -> StepStart:
        """A step begins now, with data that comes next."""
        for iterator in iterators:
            iterator.advance(generators=captured)
        return cls(iterators, ProcessState.of(kept) if captured else None)

    @classmethod
    def stored(
        cls, packed: torch.Tensor, iterators: Iterators, kept: Sequence[Kept]
    ) -> tuple[StepStart, Suspicion | None]:
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
        start = cls(iterators, ProcessState(content["generators"], content["kept"]))
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
