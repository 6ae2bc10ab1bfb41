"""The machine's decision for the training loop, and exit codes for the launcher."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.rerun.attribution import Attribution
from shardproof.rerun.transitions import Action, Effect

__all__ = ["Decision", "ExitCodes"]


@dataclass(frozen=True, slots=True)
class ExitCodes:
    """The exit codes of a job, for its launcher.

    >>> ExitCodes(restart=75).failed
    17
    """

    restart: int = 16
    """Restart the job on other devices, to rerun a step with a rejected result."""
    failed: int = 17
    """A result was rejected, and training must not continue with it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a step. Equal on all ranks."""

    checkpoint: bool = False
    """Save the state as it is now, before the optimizer step, as a suspect checkpoint."""
    exit: bool = False
    """Exit this process with `code`, and discard the results of the step."""
    code: int = 0
    attribution: Attribution | None = None
    """The attribution of the rejected results of the step, if this step decided it."""
    settles: bool = False
    """True if `attribution` resolves the pending rerun of a suspect checkpoint."""

    @classmethod
    def of(cls, action: Action, attribution: Attribution | None, codes: ExitCodes) -> Decision:
        """Convert an action of the table."""
        restart = action.effect in (Effect.RESTART, Effect.RESTART_UNSAVED)
        stop = action.effect is Effect.STOP
        return cls(
            checkpoint=action.effect is Effect.RESTART,
            exit=restart or stop,
            code=codes.restart if restart else codes.failed if stop else 0,
            attribution=attribution,
            settles=action.settles,
        )
