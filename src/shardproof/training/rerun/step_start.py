"""The start of a step on one rank: data, generators and buffers, from which the step can run again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from shardproof.engine.state import RandomState
from shardproof.errors import StructureError
from shardproof.training.rerun.byte_tensor import pack, unpack
from shardproof.training.rerun.replay import ReplayableIterator
from shardproof.training.rerun.step_run import Suspicion


class StepState(Protocol):
    """State that a step changes and that the machine restores before it runs the step again."""

    def save(self) -> Any:
        """Return a copy of the state: plain data and tensors, in dicts, lists and tuples."""

    def restore(self, saved: Any) -> None:
        """Restore what `save` returned, in this process or in one that was started later."""


class BufferState:
    """The buffers of a module, which a forward pass may change (running statistics, counters).

    Args:
        module: any module; its buffers are copied at the beginning of each step.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> buffers = BufferState(norm)
    >>> saved = buffers.save()
    >>> _ = norm(torch.randn(4, 2))
    >>> buffers.restore(saved)
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
    """The state of a process when a step began, without the step's data."""

    generators: dict[str, Any]
    """State of the random generators, from `RandomState.state_dict`."""
    saved: list[Any]
    """The result of `save` of each `StepState`."""

    @classmethod
    def of(cls, step_state: Iterable[StepState]) -> ProcessState:
        """Save the state of this process now."""
        return cls(RandomState().state_dict(), [one.save() for one in step_state])

    def restore(self, step_state: Sequence[StepState]) -> None:
        """Restore the generators and every `StepState`.

        Raises:
            StructureError: the number of `StepState` objects differs from the number saved.
        """
        if len(step_state) != len(self.saved):
            raise StructureError(
                f"the suspicious step began with {len(self.saved)} step_state objects, and the machine has "
                f"{len(step_state)}. Make the machine with the step_state of the previous run"
            )
        for one, saved in zip(step_state, self.saved, strict=True):
            one.restore(saved)
        RandomState().load_state_dict(self.generators)


def _shapes(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "none"


Iterators = tuple[ReplayableIterator[Any], ...]


@dataclass(frozen=True, slots=True)
class StepStart:
    """Everything from which a step can run again: its data and the state of the process."""

    iterators: Iterators
    beginning: ProcessState | None
    """None for a step that is not validated: it never runs again."""

    @classmethod
    def new(cls, iterators: Iterators, step_state: Sequence[StepState], *, captured: bool) -> StepStart:
        """Begin a step with the next data of each iterator."""
        for iterator in iterators:
            iterator.advance(generators=captured)
        return cls(iterators, ProcessState.of(step_state) if captured else None)

    @classmethod
    def stored(
        cls, packed: torch.Tensor, iterators: Iterators, step_state: Sequence[StepState]
    ) -> tuple[StepStart, Suspicion | None]:
        """Begin a step from a start that another process packed.

        Raises:
            StructureError: the number of iterators or of `StepState` objects differs.
        """
        content = unpack(packed)
        microbatches, drawn = content["microbatches"], content["drawn"]
        if len(microbatches) != len(iterators):
            raise StructureError(
                f"the suspicious step took its data from {len(microbatches)} iterators, and should_run got "
                f"{len(iterators)}. Call should_run with as many iterators as the previous run"
            )
        start = cls(iterators, ProcessState(content["generators"], content["kept"]))
        for iterator, given, after in zip(iterators, microbatches, drawn, strict=True):
            iterator.load(given, after)
        start.again(step_state)
        return start, content["suspicion"] and Suspicion(**content["suspicion"])

    def again(self, step_state: Sequence[StepState]) -> None:
        """Restore the state and rewind the data to the start of the step."""
        assert self.beginning is not None
        self.beginning.restore(step_state)
        for iterator in self.iterators:
            iterator.rewind()

    def pack(self, suspicion: Suspicion | None) -> torch.Tensor:
        """Pack the start of the step, and the rejected result to compare with the rerun.

        Returns:
            1-D, uint8.

        Raises:
            PlainDataError: a checkpoint cannot hold a microbatch or a value of a `StepState`.
        """
        assert self.beginning is not None
        content = {
            "microbatches": [list(iterator.microbatches) for iterator in self.iterators],
            "drawn": [list(iterator.generators) for iterator in self.iterators],
            "generators": self.beginning.generators,
            "kept": self.beginning.saved,
            "suspicion": None if suspicion is None else asdict(suspicion),
        }
        return pack(content, "the step's beginning")


def iterators_of(data: object) -> Iterators:
    """Return the data that `should_run` got as a tuple of iterators.

    Raises:
        TypeError: the data is not made of `ReplayableIterator`.
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
