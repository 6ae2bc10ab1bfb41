"""Injects faults, to test every path of the machine."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
import xxhash

FaultKind = Literal["transient", "persistent", "correct"]
Run = Literal["initial", "in place", "from checkpoint"]
"""The first run of a step, the rerun in the same process, or the rerun after a restart."""


class FaultInjector:
    """Replaces results by wrong values, at chosen or random steps.

    A call is hit depending only on seed, step, rank and call. So every repetition of a run, on any
    machine, hits the same calls. The kind determines which runs of a step see the wrong value:

    ============== =========================================================================================
    ``transient``  only the first run
    ``persistent`` all runs on the device of the first run; on other devices, the value is right
    ``correct``    all runs, as with a bad batch or an error in the program
    ============== =========================================================================================

    The machine saves the injector's state (the device of the first run) in the checkpoint.

    Args:
        kind: one of the above.
        rate: probability that a call is hit, from 0.0 to 1.0.
        steps: steps in which every call is hit.
        ranks: ranks that can be hit; None for all.
        seed: seed of the random choice.
        factor: the wrong value is the right value times this factor; None for NaN.

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
            raise ValueError(f"kind is {kind!r}, not one of {', '.join(get_args(FaultKind))}")
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"rate is {rate}, not a probability from 0 to 1")
        if rate == 0.0 and not steps:
            raise ValueError("nothing would be injected: set a rate above 0, or steps")
        self.kind = kind
        self.rate = rate
        self.steps = frozenset(steps)
        self.ranks = None if ranks is None else frozenset(ranks)
        self.seed = seed
        self.factor = factor
        self._began: tuple[int, str] | None = None

    def hits(self, *, step: int, rank: int, call: int) -> bool:
        """Return True if a call is hit, in the runs that the kind selects.

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
        """Return the value, or a wrong value if the call is hit.

        Args:
            value: a number or a tensor, which is not modified. A wrong tensor has no autograd graph.
            step: number of the step.
            rank: rank of this process.
            call: position of the `validate` call in the step, from 0.
            run: the run of the step.
            identity: identity of this rank's device. Its text must be unique to the device.

        Raises:
            TypeError: an integer tensor, which cannot hold NaN, is hit and `factor` is None.
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
        """Return the step and the device of this rank's last persistent fault, as plain data."""
        return {"began": None if self._began is None else list(self._began)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._began = None if state["began"] is None else tuple(state["began"])

    def _wrong(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return math.nan if self.factor is None else value * self.factor
        right = value.detach()
        if self.factor is not None:
            return right * self.factor
        if not (right.is_floating_point() or right.is_complex()):
            raise TypeError(f"a tensor of {right.dtype} cannot be NaN: set factor= of the injector")
        return torch.full_like(right, math.nan)
