"""The device that a rejected result is attributed to, with the evidence."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shardproof.rerun.result_log import Rejected
from shardproof.rerun.transitions import AttributionKind

__all__ = ["Attribution", "DeviceIdentity", "Shown", "Suspect"]


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """A device, as it can be told from all others, also after a restart.

    Args:
        node: the node's name.
        uuid: of the accelerator; "" where there is none, or where it has none.
        index: of the device on its node.

    >>> a = DeviceIdentity("gpu-7", "GPU-2f1e", 3)
    >>> a == DeviceIdentity("gpu-7", "GPU-2f1e", 3), str(a)
    (True, 'device 3 (GPU-2f1e) of node gpu-7')
    """

    node: str
    uuid: str = ""
    index: int = 0

    @classmethod
    def here(cls) -> DeviceIdentity:
        """The device of this process: the current accelerator, or its share of the node's CPUs.

        On a CPU there is no UUID, and the index is the rank on the node (``LOCAL_RANK``, 0 without it).
        """
        index, uuid = int(os.environ.get("LOCAL_RANK", "0")), ""
        if torch.accelerator.is_available():
            index, uuid = _current_device()
        return cls(socket.gethostname(), uuid, index)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> DeviceIdentity:
        """The identity that `to_plain` described."""
        return cls(plain["node"], plain["uuid"], plain["index"])

    def same_device(self, other: DeviceIdentity) -> bool:
        """Whether both are one device. A UUID is the device's own; node names and indices are given anew.

        >>> before = DeviceIdentity("pod-a", "GPU-2f1e", 3)
        >>> before.same_device(DeviceIdentity("pod-b", "GPU-2f1e", 0))
        True
        >>> before.same_device(DeviceIdentity("pod-a", "", 3))
        False
        """
        if self.uuid and other.uuid:
            return self.uuid == other.uuid
        return self == other

    def to_plain(self) -> dict[str, Any]:
        """This identity as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        uuid = f" ({self.uuid})" if self.uuid else ""
        return f"device {self.index}{uuid} of node {self.node}"


def _current_device() -> tuple[int, str]:
    """Index and UUID, as far as the device's module tells them."""
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    index = module.current_device() if hasattr(module, "current_device") else 0
    if not hasattr(module, "get_device_properties"):
        return index, ""
    return index, str(getattr(module.get_device_properties(index), "uuid", ""))


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
