"""The machine's state in a checkpoint.

The state has two parts. ``job`` is equal on all ranks and records whether a rerun is pending. ``own`` is the
state of one rank. A pending rerun does not change their keys. The start of the suspicious step (microbatches,
random generators, `StepState` values, the rejected result) is one tensor of bytes in ``own``. The tensor is
empty if no rerun is pending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardproof.engine.state import PerRank
from shardproof.errors import StructureError
from shardproof.training.rerun.attribution import Suspect
from shardproof.training.rerun.injection import FaultInjector
from shardproof.training.rerun.result_log import Differences
from shardproof.training.rerun.step_run import Rejections
from shardproof.training.rerun.transitions import AttributionKind, State

_MAX_NAMES, _OTHERS = 256, "(others)"
"""Largest number of results with separate statistics. Messages may include the step number."""


@dataclass(frozen=True, slots=True)
class _StatePart:
    """A part of the machine's state, as an object that a checkpoint saves and loads."""

    read: Callable[[], dict[str, Any]]
    write: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        return self.read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.write(state)


@dataclass
class JobState:
    """State that is equal on all ranks."""

    world_size: int
    layout: str
    step: int = 0
    """Number of decided steps."""
    state: State = State.NOT_RUNNING
    suspects: tuple[Suspect, ...] = ()
    """The suspects of the pending or running rerun, in rank order."""
    attributed: Counter[AttributionKind] = field(default_factory=Counter)
    """Number of steps by attribution."""

    @property
    def pending(self) -> bool:
        """True if a step waits for a rerun on another device."""
        return self.state is State.WILL_RERUN

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "state": self.state.value,
            "step": self.step,
            "world_size": self.world_size,
            "layout": self.layout,
            "suspects": [suspect.to_plain() for suspect in self.suspects],
            "attributed": {kind.value: self.attributed[kind] for kind in AttributionKind},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, except for world size and layout."""
        self.state = State(state["state"])
        self.step = state["step"]
        self.suspects = tuple(map(Suspect.from_plain, state["suspects"]))
        self.attributed = Counter({AttributionKind(name): n for name, n in state["attributed"].items()})

    def mismatch(self, stored: dict[str, Any]) -> str:
        """The differences of this run to the run that stored a pending rerun; empty if there are none."""
        if stored["state"] != State.WILL_RERUN.value:
            return ""
        differs = []
        if stored["world_size"] != self.world_size:
            differs.append(f"{stored['world_size']} ranks, now {self.world_size}")
        if stored["layout"] != self.layout:
            differs.append(f"layout {stored['layout']!r}, now {self.layout!r}")
        return "; ".join(differs)


class RankState:
    """State of one rank."""

    def __init__(self, inject: FaultInjector | None) -> None:
        self._inject = inject
        self.rejections = Rejections()
        self.differences: dict[str, Differences] = {}
        """Differences between runs, by name of the validated result."""
        self.step_data: torch.Tensor
        """The packed start of the suspicious step; empty if no rerun is pending."""
        self.clear_step()

    def clear_step(self) -> None:
        """Drop the start of the suspicious step."""
        self.step_data = torch.empty(0, dtype=torch.uint8, device="cpu")

    def count(self, differences: dict[str, float]) -> None:
        """Add the differences between two runs of a step."""
        for name, difference in differences.items():
            separate = name in self.differences or len(self.differences) < _MAX_NAMES
            self.differences.setdefault(name if separate else _OTHERS, Differences()).add(difference)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data and one tensor."""
        return {
            "rejections": self.rejections.state_dict(),
            "differences": {name: seen.state_dict() for name, seen in self.differences.items()},
            "inject": self._inject.state_dict() if self._inject is not None else {},
            "step_data": self.step_data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.rejections.load_state_dict(state["rejections"])
        self.differences = {}
        for name, counts in state["differences"].items():
            self.differences[name] = Differences()
            self.differences[name].load_state_dict(counts)
        if self._inject is not None and state["inject"]:
            self._inject.load_state_dict(state["inject"])
        self.step_data = state["step_data"]


class PersistentState:
    """Saves and loads the state of the job and of this rank.

    Args:
        world_size: number of ranks.
        layout: the user's text for the parallel layout.
        drops: True to drop a pending rerun that a run of another shape stored.
        inject: an injector whose state is part of the rank's state, or None.
    """

    def __init__(self, world_size: int, layout: str, *, drops: bool, inject: FaultInjector | None) -> None:
        self.job = JobState(world_size, layout)
        self.own = RankState(inject)
        self._drops = drops
        self._loaded: dict[str, dict[str, Any]] = {}
        """The states of the objects in `tree` that a load has set, by name."""

    def tree(self) -> dict[str, Any]:
        """The state tree for saves and loads."""
        job = _StatePart(self.job.state_dict, partial(self._loaded.__setitem__, "job"))
        own = _StatePart(self.own.state_dict, partial(self._loaded.__setitem__, "own"))
        return {"job": job, "own": PerRank(own)}

    def check(self, stored: dict[str, Any]) -> None:
        """Refuse, before a load, a pending rerun that a run of another shape stored."""
        self._loaded.clear()  # a failed load may have filled it partly
        if not self._drops and (differs := self.job.mismatch(stored["job"])):
            raise StructureError(
                f"step {stored['job']['step']} waits for a rerun, but a run of another shape saved it "
                f"({differs}), and its microbatches belong to its ranks. Resume with the saved shape, on "
                'other devices; or drop the rerun with RerunMachine(pending="drop"), which skips its '
                "microbatches and gives no attribution; or restore a checkpoint that is not suspect"
            )

    def apply_loaded(self) -> str:
        """Apply the state of a load.

        Returns:
            The `JobState.mismatch` for which a pending rerun was dropped; empty if none was.
        """
        loaded = dict(self._loaded)
        self._loaded.clear()
        mismatch = self.job.mismatch(loaded["job"])
        self.job.load_state_dict(loaded["job"])
        if "own" in loaded:  # absent on ranks beyond the saved world size
            self.own.load_state_dict(loaded["own"])
        if mismatch or not self.job.pending:
            self.clear_pending()
        return mismatch

    def clear_pending(self) -> None:
        """Clear the pending rerun."""
        self.job.state, self.job.suspects = State.NOT_RUNNING, ()
        self.own.clear_step()
