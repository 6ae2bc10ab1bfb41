"""The result of a restore: the step, the report of the load, and the newer steps that were passed over."""

from __future__ import annotations

from typing import NoReturn

from shardproof.engine.loading import LoadReport
from shardproof.runs.checkpointer.step_selection import PassedOver


class RestoredStep(int):
    """The step that `Checkpointer.restore` loaded: an `int` with a report of the restore.

    It compares, hashes, formats and JSON-encodes as the number of the step. Arithmetic gives a plain `int`.
    A checkpoint stores it as a plain `int`, too. The attributes cannot be set. The number and `passed_over`
    are the same on every rank. Each rank has its own `report`.

    Args:
        step: number of the step.
        report: report of the load on this rank.
        passed_over: newer steps that the restore passed over, with the reasons; newest first. With several
            tiers also copies of the restored step in nearer tiers, and with `node_local` on nodes.
        tier: the location of the run in the tier that the step was restored from. Single files that are lost
            there were read from another tier, as `passed_over` says. Empty without a run.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> checkpointer = sp.Checkpointer(tempfile.mkdtemp())
        >>> _ = checkpointer.save(7, {"w": torch.ones(2)}).result()
        >>> step = checkpointer.restore({"w": torch.zeros(2)})
        >>> step, step + 1, step.passed_over
        (7, 8, ())
    """

    __stored_as__ = int
    """The type of plain data that a checkpoint stores in its place."""
    report: LoadReport
    """Report of the load on this rank."""
    passed_over: tuple[PassedOver, ...]
    """Newer steps that the restore passed over, with the reasons; newest first."""
    tier: str
    """The location of the run in the tier that the step was restored from; empty without a run."""

    def __new__(
        cls, step: int, report: LoadReport, passed_over: tuple[PassedOver, ...] = (), tier: str = ""
    ) -> RestoredStep:
        """Makes the value; see the class."""
        made = super().__new__(cls, step)
        made.__dict__.update(report=report, passed_over=tuple(passed_over), tier=tier)
        return made

    def __reduce__(self) -> tuple[type[RestoredStep], tuple[int, LoadReport, tuple[PassedOver, ...], str]]:
        """Supports pickle and copy."""
        return RestoredStep, (int(self), self.report, self.passed_over, self.tier)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuses: the value is frozen.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"RestoredStep is frozen: {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuses, as `__setattr__`.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"RestoredStep is frozen: {name!r} cannot be deleted")
