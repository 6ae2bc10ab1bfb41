"""What the machine remembers from one process to the next, and how it stands in a checkpoint.

Two values: ``job``, which is the same on all ranks and says whether a rerun is pending, and ``own``, which
each rank has for itself. They have the same keys whether a rerun is pending or not. What the suspicious step
began with (microbatches, generators, kept values, the rejected result) is one tensor of bytes in ``own``,
which is empty when nothing is pending: its length is all that changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardproof.errors import StructureError
from shardproof.rerun.attribution import Suspect
from shardproof.rerun.injection import FaultInjector
from shardproof.rerun.statistics import Differences
from shardproof.rerun.step_run import Rejections
from shardproof.rerun.transitions import AttributionKind, State
from shardproof.state import PerRank

__all__ = ["JobState", "PersistentState"]

_NAMES, _OTHERS = 256, "(others)"
"""So many results have statistics of their own: a message may hold the number of the step."""


@dataclass(frozen=True, slots=True)
class _StatePart:
    """A part of the machine's state, as a checkpoint takes it and gives it back."""

    read: Callable[[], dict[str, Any]]
    write: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        """The part, now."""
        return self.read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What is stored of it."""
        self.write(state)


@dataclass
class JobState:
    """What is the same on all ranks.

    Args:
        world_size: number of ranks.
        layout: the user's text for the parallel layout.
    """

    world_size: int
    layout: str
    step: int = 0
    """Steps that were decided."""
    state: State = State.NOT_RUNNING
    suspects: tuple[Suspect, ...] = ()
    """Of the step that runs again, or shall, in the order of their ranks."""
    attributed: Counter[AttributionKind] = field(default_factory=Counter)
    """Number of steps by what their rejected results were put down to."""

    @property
    def pending(self) -> bool:
        """Whether a step waits to be run again elsewhere."""
        return self.state is State.WILL_RERUN

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "state": self.state.value,
            "step": self.step,
            "world_size": self.world_size,
            "layout": self.layout,
            "suspects": [suspect.to_plain() for suspect in self.suspects],
            "attributed": {kind.value: self.attributed[kind] for kind in AttributionKind},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. World size and layout remain those of this run."""
        self.state = State(state["state"])
        self.step = state["step"]
        self.suspects = tuple(map(Suspect.from_plain, state["suspects"]))
        self.attributed = Counter({AttributionKind(name): n for name, n in state["attributed"].items()})

    def elsewhere(self, stored: dict[str, Any]) -> str:
        """How the run that stored a pending rerun differs from this one; "" if not, or if none is pending.

        Args:
            stored: what `state_dict` gave there.
        """
        if stored["state"] != State.WILL_RERUN.value:
            return ""
        differs = []
        if stored["world_size"] != self.world_size:
            differs.append(f"{stored['world_size']} ranks, now {self.world_size}")
        if stored["layout"] != self.layout:
            differs.append(f"layout {stored['layout']!r}, now {self.layout!r}")
        return "; ".join(differs)

    def check(self, stored: dict[str, Any]) -> None:
        """Refuse a pending rerun of another run's shape.

        Raises:
            StructureError: with what can be done.
        """
        differs = self.elsewhere(stored)
        if differs:
            raise StructureError(
                f"step {stored['step']} waits to be run again, to tell a faulty device from a bad batch, and "
                f"was saved by a run of another shape ({differs}): its microbatches belong to those ranks. "
                "Resume it with that shape, on other devices, and let it be decided; or drop it with "
                'RerunMachine(pending="drop"), which leaves out its microbatches and its verdict; or restore '
                "a checkpoint that is not suspect"
            )


class RankState:
    """What a rank has for itself.

    Args:
        inject: the injector whose state is kept too.
    """

    def __init__(self, inject: FaultInjector | None) -> None:
        self._inject = inject
        self.rejections = Rejections()
        self.differences: dict[str, Differences] = {}
        """By name of the validated result."""
        self.step_data = torch.empty(0, dtype=torch.uint8, device="cpu")
        """What the suspicious step began with, packed; empty when nothing is pending."""

    def forget_step(self) -> None:
        """Nothing is pending."""
        self.step_data = torch.empty(0, dtype=torch.uint8, device="cpu")

    def count(self, differences: dict[str, float]) -> None:
        """Add the differences between two runs of a step."""
        for name, difference in differences.items():
            known = name in self.differences or len(self.differences) < _NAMES
            self.differences.setdefault(name if known else _OTHERS, Differences()).add(difference)

    def state_dict(self) -> dict[str, Any]:
        """As plain data and one tensor."""
        return {
            "rejections": self.rejections.state_dict(),
            "differences": {name: seen.state_dict() for name, seen in self.differences.items()},
            "inject": self._inject.state_dict() if self._inject is not None else {},
            "step_data": self.step_data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.rejections.load_state_dict(state["rejections"])
        self.differences = {}
        for name, counts in state["differences"].items():
            self.differences[name] = Differences()
            self.differences[name].load_state_dict(counts)
        if self._inject is not None and state["inject"]:
            self._inject.load_state_dict(state["inject"])
        self.step_data = state["step_data"]


class PersistentState:
    """Both, and the way into a checkpoint and out of it.

    Args:
        world_size: number of ranks.
        layout: the user's text for the parallel layout.
        drops: whether a pending rerun of a run of another shape is dropped.
        inject: the injector whose state is kept too.
    """

    def __init__(self, world_size: int, layout: str, *, drops: bool, inject: FaultInjector | None) -> None:
        self.job = JobState(world_size, layout)
        self.own = RankState(inject)
        self._drops = drops
        self._loaded: dict[str, dict[str, Any]] = {}

    def tree(self) -> dict[str, Any]:
        """What is saved, and filled by a load."""
        job = _StatePart(self.job.state_dict, partial(self._loaded.__setitem__, "job"))
        own = _StatePart(self.own.state_dict, partial(self._loaded.__setitem__, "own"))
        return {"job": job, "own": PerRank(own)}

    def check(self, stored: dict[str, Any]) -> None:
        """Before a load. See `JobState.check`."""
        self._loaded.clear()  # a load that failed may have left something
        if not self._drops:
            self.job.check(stored["job"])

    def take_over(self) -> str:
        """After a load: go on from what it brought.

        Returns:
            How the run whose pending rerun is dropped differs from this one; "" if none is.
        """
        loaded = dict(self._loaded)
        self._loaded.clear()
        elsewhere = self.job.elsewhere(loaded["job"])
        self.job.load_state_dict(loaded["job"])
        if "own" in loaded:  # not on ranks beyond those that saved
            self.own.load_state_dict(loaded["own"])
        if elsewhere or not self.job.pending:
            self.settle()
        return elsewhere

    def settle(self) -> None:
        """No step waits to be run again."""
        self.job.state, self.job.suspects = State.NOT_RUNNING, ()
        self.own.forget_step()
