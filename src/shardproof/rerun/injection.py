"""Faults on purpose, so that every path of the machine can be tried before a device takes it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
import xxhash

__all__ = ["FaultInjector", "FaultKind", "Run"]

FaultKind = Literal["transient", "persistent", "correct"]
Run = Literal["initial", "in place", "from checkpoint"]
"""Which run of a step: the first, the one after it in the same process, or the one after a restart."""


class FaultInjector:
    """Puts a wrong value in the place of a result, at steps named or drawn.

    Whether a call is hit follows from seed, step, rank and call alone, so that a run that is repeated is hit
    again at the same places, on any machine. The kind says which runs of such a step see the wrong value:

    ============== =========================================================================================
    ``transient``  the first one alone
    ``persistent`` all that are on the device where the fault began: on another one the value is right
    ``correct``    all, as a bad batch or an error in the program would
    ============== =========================================================================================

    Its state (where the fault began) belongs in the checkpoint; the machine puts it there.

    Args:
        kind: one of the above.
        rate: chance of a call to be hit, from 0.0 to 1.0.
        steps: steps all of whose calls are hit.
        ranks: ranks that can be hit; None for all.
        seed: of the draw.
        factor: the wrong value is the right one times this; None for NaN.

    Raises:
        ValueError: an unknown kind, a rate outside of 0 to 1, or neither a rate nor steps.

    >>> injector = FaultInjector("transient", steps=[3], ranks=[0])
    >>> at = {"step": 3, "rank": 0, "call": 0, "identity": "node-a/GPU-1"}
    >>> injector.apply(2.5, run="initial", **at), injector.apply(2.5, run="in place", **at)
    (nan, 2.5)
    """

    def __init__(
        self,
        kind: FaultKind,
        *,
        rate: float = 0.0,
        steps: Collection[int] = (),
        ranks: Collection[int] | None = None,
        seed: int = 0,
        factor: float | None = None,
    ) -> None:
        if kind not in get_args(FaultKind):
            raise ValueError(f"a fault is one of {', '.join(get_args(FaultKind))}, not {kind!r}")
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"a rate is a chance from 0 to 1, not {rate}")
        if rate == 0.0 and not steps:
            raise ValueError("nothing would be injected: give a rate above 0, or steps")
        self.kind = kind
        self.rate = rate
        self.steps = frozenset(steps)
        self.ranks = None if ranks is None else frozenset(ranks)
        self.seed = seed
        self.factor = factor
        self._began: tuple[int, str] | None = None

    def hits(self, *, step: int, rank: int, call: int) -> bool:
        """Whether a call is hit, in those runs that the kind names.

        >>> FaultInjector("correct", rate=1.0, ranks=[1]).hits(step=0, rank=0, call=0)
        False
        """
        if self.ranks is not None and rank not in self.ranks:
            return False
        if step in self.steps:
            return True
        draw = xxhash.xxh3_64_intdigest(f"{self.seed} {step} {rank} {call}".encode()) / 2.0**64
        return draw < self.rate

    def apply(self, value: Any, *, step: int, rank: int, call: int, run: Run, identity: object) -> Any:
        """The value that the machine shall see: the one given, or a wrong one.

        Args:
            value: a number or a tensor. It is never written to, and a wrong tensor is not part of its graph.
            step: number of the step.
            rank: of this process.
            call: which call of `validate` in the step, from 0.
            run: which run of the step.
            identity: of this rank's device; its text tells devices apart.

        Raises:
            TypeError: a value without NaN (a tensor of whole numbers) is hit and no factor was given.
        """
        if not self.hits(step=step, rank=rank, call=call):
            return value
        if self.kind == "transient" and run != "initial":
            return value
        if self.kind == "persistent":
            if run == "initial":
                self._began = (step, str(identity))
            elif self._began != (step, str(identity)):
                return value
        return self._wrong(value)

    def state_dict(self) -> dict[str, Any]:
        """Where the last persistent fault of this rank began, as plain data."""
        return {"began": None if self._began is None else list(self._began)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._began = None if state["began"] is None else tuple(state["began"])

    def _wrong(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return math.nan if self.factor is None else value * self.factor
        right = value.detach()
        if self.factor is not None:
            return right * self.factor
        if not (right.is_floating_point() or right.is_complex()):
            raise TypeError(f"a tensor of {right.dtype} cannot be NaN: give the injector a factor")
        return torch.full_like(right, math.nan)
