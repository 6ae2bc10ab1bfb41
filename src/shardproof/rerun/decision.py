"""What the machine tells the loop, and the launcher."""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.rerun.attribution import Attribution
from shardproof.rerun.transitions import Action, Effect

__all__ = ["Decision", "ExitCodes"]


@dataclass(frozen=True, slots=True)
class ExitCodes:
    """What a job ends with, for its launcher.

    >>> ExitCodes(restart=75).failed
    17
    """

    restart: int = 16
    """Start the job again, on other devices: a rejected result shall be computed there."""
    failed: int = 17
    """A result was rejected, and training must not go on with it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the loop does with a step. Equal on all ranks."""

    checkpoint: bool = False
    """Save the state as it is now, before the optimizer step, as a suspect checkpoint."""
    exit: bool = False
    """End this process with `code`, and do not use what the step computed."""
    code: int = 0
    attribution: Attribution | None = None
    """What the rejected results of the step were found to be, if that is known now."""
    settles: bool = False
    """Whether that is what the suspect checkpoint was taken to find out."""

    @classmethod
    def of(cls, action: Action, attribution: Attribution | None, codes: ExitCodes) -> Decision:
        """What an action of the table means for the loop."""
        restart = action.effect in (Effect.RESTART, Effect.RESTART_UNSAVED)
        stop = action.effect is Effect.STOP
        return cls(
            checkpoint=action.effect is Effect.RESTART,
            exit=restart or stop,
            code=codes.restart if restart else codes.failed if stop else 0,
            attribution=attribution,
            settles=action.settles,
        )
