"""What optimizers keep of their parameters, in terms that do not depend on the optimizer.

A *slot* is one tensor or value that an optimizer keeps of one parameter. Torch's own optimizers keep slots in
`optimizer.state`, shaped like what the rank holds of the parameter. An optimizer that keeps them in another
way (ranges of flat buffers, copies on another device) is a `SlotKeeper`: it says what it holds, without
communicating, and takes what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

__all__ = [
    "MASTER",
    "LocalRange",
    "ParameterSlots",
    "Receipt",
    "Receiver",
    "SlotKeeper",
    "StoredSlot",
    "options_of",
]

MASTER = "master"
"""The slot that holds a parameter's values in a wider dtype than the parameter's own."""


_NOT_OPTIONS = ("params", "param_names")


def options_of(group: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """The options in a group of an optimizer.

    >>> options_of({"params": [], "lr": 0.1, "capturable": True}, {"capturable"})
    {'lr': 0.1}
    """
    return {name: item for name, item in group.items() if name not in _NOT_OPTIONS and name not in without}


@dataclass(frozen=True, slots=True, eq=False)
class LocalRange:
    """A 1-D buffer with the row-major elements [start, stop) of a parameter's local tensor.

    An empty range declares the slot, with the buffer's dtype, on a rank that owns nothing of it.

    >>> LocalRange(torch.zeros(3), 2, 5)
    LocalRange(float32, [2, 5))
    """

    buffer: torch.Tensor
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.buffer.dim() != 1 or self.buffer.numel() != self.stop - self.start:
            raise ValueError(
                f"the buffer of a range of [{self.start}, {self.stop}) has shape {list(self.buffer.shape)}"
            )

    def __repr__(self) -> str:
        return f"LocalRange({str(self.buffer.dtype).removeprefix('torch.')}, [{self.start}, {self.stop}))"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSlots:
    """What an optimizer keeps of one parameter, as one rank describes it."""

    parameter: torch.Tensor
    """The program's own parameter, which has a name."""
    kind: str
    """Class of the torch optimizer whose update rule it is."""
    options: Mapping[str, Any]
    """Options of its group: learning rate, betas, ..."""
    tensors: Mapping[str, torch.Tensor | LocalRange]
    """By slot: of the parameter's local shape, a DTensor like it, a scalar, or a range of it."""
    values: Mapping[str, Any]
    """Slots that are plain values."""


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """A tensor slot as a checkpoint has it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """As this rank would hold it: that of the parameter's local tensor, or () for a scalar."""


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """How an optimizer takes the stored slots of one parameter."""

    kind: str
    """As in `ParameterSlots`."""
    tensors: Mapping[str, torch.Tensor | LocalRange]
    """Destinations. May name the master though none is stored: a stored weight of its dtype fills it."""
    attach: Callable[[Mapping[str, Any], frozenset[str]], None]
    """Called once all bytes are there, with the plain values and the tensor slots that were filled. The state
    becomes what was stored: other slots are dropped. A master that was not filled is made from the
    parameter."""


Receiver: TypeAlias = Callable[[torch.Tensor, dict[str, Any], Mapping[str, StoredSlot]], Receipt]
"""Takes a parameter, the group that it is in, and the stored tensor slots."""


@runtime_checkable
class SlotKeeper(Protocol):
    """An optimizer that describes its own state. None of these calls communicates."""

    param_groups: list[dict[str, Any]]

    def describe_slots(self) -> Iterable[ParameterSlots]:
        """Every parameter of every group, whether or not this rank holds anything of it."""

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """How one parameter takes what is stored. Touches nothing that is in use."""

    def describe_shared(self) -> dict[str, Any]:
        """Plain values beside the parameters' (a loss scale)."""

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Takes what `describe_shared` gave."""
