"""What the machine tells the loop, and the launcher.

Whom a rejected result is put down to, with the evidence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from shardproof.rerun.identity import DeviceIdentity
from shardproof.rerun.result_log import Rejected
from shardproof.rerun.transitions import Action, AttributionKind, Effect

__all__ = ["Attribution", "Decision", "ExitCodes", "Shown", "Suspect"]


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


Shown = float | int | str | None


"""A result for people and logs: see `shardproof.rerun.result_log.shown_value`."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """The first rejected result of one rank in a step, and what became of it when the step ran again.

    >>> suspect = Suspect(1, DeviceIdentity("gpu-7"), 0, "loss", float("nan"))
    >>> print(suspect.again(2.5, reproduced=False))
    rank 1 on device 0 of node gpu-7: 'loss' was nan, and 2.5 when run again
    """

    rank: int
    identity: DeviceIdentity
    """The device of the first run."""
    call: int
    """Which call of `validate` in the step, from 0."""
    message: str
    first: Shown
    """What the first run gave."""
    second: Shown = None
    """What the last run gave; None where the call was not reached."""
    reproduced: bool = False
    """Whether the last run gave the same."""
    same_device: bool = True
    """Whether the last run was on the device of the first."""

    @property
    def kind(self) -> AttributionKind:
        """What this rank's result is put down to, now that the last run has decided."""
        if self.reproduced:
            return AttributionKind.CORRECT_RESULT
        return AttributionKind.TRANSIENT_FAULT if self.same_device else AttributionKind.PERSISTENT_FAULT

    def again(self, second: Shown, *, reproduced: bool) -> Suspect:
        """This suspect after another run."""
        return replace(self, second=second, reproduced=reproduced)

    def to_plain(self) -> dict[str, Any]:
        """This suspect as plain data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Suspect:
        """The suspect that `to_plain` described."""
        return cls(**(plain | {"identity": DeviceIdentity.from_plain(plain["identity"])}))

    @property
    def suspicion(self) -> str:
        """What was rejected, as far as the first run tells."""
        what = repr(self.message) if self.message else f"call {self.call}"
        return f"rank {self.rank} on {self.identity}: {what} was {_text(self.first)}"

    def __str__(self) -> str:
        if self.reproduced:
            then = "the same"
        else:
            then = "did not come up" if self.second is None else _text(self.second)
        where = "" if self.same_device else " on another device"
        return f"{self.suspicion}, and {then} when run again{where}"


@dataclass(frozen=True, slots=True)
class Attribution:
    """What rejected results of a step were found to be. Its text is a line for the log.

    >>> suspect = Suspect(1, DeviceIdentity("gpu-7"), 0, "loss", float("nan"))
    >>> suspect = suspect.again(2.5, reproduced=False)
    >>> print(Attribution(AttributionKind.TRANSIENT_FAULT, 12, (suspect,)))
    transient fault in step 12: rank 1 on device 0 of node gpu-7: 'loss' was nan, and 2.5 when run again
    """

    kind: AttributionKind
    step: int
    """As `RerunMachine.step` counts."""
    suspects: tuple[Suspect, ...]
    """In the order of their ranks. With several, `Suspect.kind` says what is put down to each."""

    def records(self, time: float) -> list[Rejected]:
        """A record for the log of each suspect.

        Args:
            time: of the decision, in seconds since 1970.
        """
        return [
            Rejected(
                step=self.step,
                rank=suspect.rank,
                node=suspect.identity.node,
                device=suspect.identity.uuid,
                index=suspect.identity.index,
                call=suspect.call,
                message=suspect.message,
                first=suspect.first,
                second=suspect.second,
                verdict=suspect.kind.value,
                time=time,
            )
            for suspect in self.suspects
        ]

    def __str__(self) -> str:
        kinds = dict.fromkeys([self.kind, *(suspect.kind for suspect in self.suspects)])
        found = {kind: [str(suspect) for suspect in self.suspects if suspect.kind is kind] for kind in kinds}
        return "; ".join(
            f"{kind.value} in step {self.step}: {'; '.join(texts)}" for kind, texts in found.items() if texts
        )


def _text(value: Shown) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
