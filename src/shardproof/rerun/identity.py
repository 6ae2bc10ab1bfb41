"""Which device a rank computes on."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["DeviceIdentity"]


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
