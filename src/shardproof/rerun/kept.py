"""What a step changes besides its results, so that it can be run again: generators, buffers, and the like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardproof.errors import StructureError
from shardproof.state import RandomState

__all__ = ["Beginning", "BufferState", "Kept"]


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
class Beginning:
    """What a step began with, but for its data."""

    generators: dict[str, Any]
    """The generators of the process, as `RandomState` describes them."""
    kept: list[Any]
    """What each of the kept objects saved."""

    @classmethod
    def of(cls, kept: Iterable[Kept]) -> Beginning:
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
