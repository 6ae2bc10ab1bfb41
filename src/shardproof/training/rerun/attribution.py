"""The attribution of a rejected result, with the evidence and the device."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shardproof._utils.accelerator import available_accelerator
from shardproof.training.rerun.result_log import Rejected
from shardproof.training.rerun.transitions import AttributionKind


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Identifies a device, also after a restart.

    Args:
        node: the node's name.
        uuid: UUID of the accelerator; "" if there is no accelerator or it has no UUID.
        index: index of the device on its node.

    >>> a = DeviceIdentity("gpu-7", "GPU-2f1e", 3)
    >>> a == DeviceIdentity("gpu-7", "GPU-2f1e", 3), str(a)
    (True, 'device 3 (GPU-2f1e) of node gpu-7')
    """

    node: str
    uuid: str = ""
    index: int = 0

    @classmethod
    def here(cls) -> DeviceIdentity:
        """The device of this process: the current accelerator, or the CPU.

        A CPU has no UUID. Its index is the rank on the node (``LOCAL_RANK``, or 0 if it is not set).
        """
        index, uuid = int(os.environ.get("LOCAL_RANK", "0")), ""
        accelerator = available_accelerator()
        if accelerator is not None:
            module = torch.get_device_module(accelerator)
            index = module.current_device() if hasattr(module, "current_device") else 0
            if hasattr(module, "get_device_properties"):
                uuid = str(getattr(module.get_device_properties(index), "uuid", ""))
        return cls(socket.gethostname(), uuid, index)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> DeviceIdentity:
        """Decode the value of `to_plain`."""
        return cls(plain["node"], plain["uuid"], plain["index"])

    def same_device(self, other: DeviceIdentity) -> bool:
        """Return True if both are the same device. A restart may change node name and index, not the UUID.

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
        """Encode this identity as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        uuid = f" ({self.uuid})" if self.uuid else ""
        return f"device {self.index}{uuid} of node {self.node}"


Shown = float | int | str | None
"""A result for messages and logs. See `shardproof.training.rerun.result_log.shown_value`."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """The first rejected result of one rank in a step, and the result of the rerun.

    >>> suspect = Suspect(1, DeviceIdentity("gpu-7"), 0, "loss", float("nan"))
    >>> print(suspect.again(2.5, reproduced=False))
    rank 1 on device 0 of node gpu-7: 'loss' was nan, and 2.5 when run again
    """

    rank: int
    identity: DeviceIdentity
    """The device of the first run."""
    call: int
    """Position of the `validate` call in the step, from 0."""
    message: str
    first: Shown
    """The result of the first run."""
    second: Shown = None
    """The result of the last run; None if the run did not reach the call."""
    reproduced: bool = False
    """True if the last run gave the same result."""
    same_device: bool = True
    """True if the last run used the device of the first run."""

    @property
    def kind(self) -> AttributionKind:
        """The attribution of this rank's result after the last run."""
        if self.reproduced:
            return AttributionKind.CORRECT_RESULT
        return AttributionKind.TRANSIENT_FAULT if self.same_device else AttributionKind.PERSISTENT_FAULT

    def again(self, second: Shown, *, reproduced: bool) -> Suspect:
        """This suspect after another run."""
        return replace(self, second=second, reproduced=reproduced)

    def to_plain(self) -> dict[str, Any]:
        """Encode this suspect as plain data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Suspect:
        """Decode the value of `to_plain`."""
        return cls(**(plain | {"identity": DeviceIdentity.from_plain(plain["identity"])}))

    @property
    def suspicion(self) -> str:
        """A text about the rejected result of the first run."""
        what = repr(self.message) if self.message else f"call {self.call}"
        return f"rank {self.rank} on {self.identity}: {what} was {_text(self.first)}"

    def __str__(self) -> str:
        if self.reproduced:
            then = "the same"
        else:
            then = "was not computed" if self.second is None else _text(self.second)
        where = "" if self.same_device else " on another device"
        return f"{self.suspicion}, and {then} when run again{where}"


@dataclass(frozen=True, slots=True)
class Attribution:
    """The attribution of the rejected results of a step. `str` gives a line for the log.

    >>> suspect = Suspect(1, DeviceIdentity("gpu-7"), 0, "loss", float("nan"))
    >>> suspect = suspect.again(2.5, reproduced=False)
    >>> print(Attribution(AttributionKind.TRANSIENT_FAULT, 12, (suspect,)))
    transient fault in step 12: rank 1 on device 0 of node gpu-7: 'loss' was nan, and 2.5 when run again
    """

    kind: AttributionKind
    step: int
    """Number of the step, as in `RerunMachine.step`."""
    suspects: tuple[Suspect, ...]
    """Suspects in rank order. `Suspect.kind` is the attribution of each."""

    def records(self, time: float) -> list[Rejected]:
        """Return a log record for each suspect.

        Args:
            time: time of the decision, in seconds since 1970.
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
