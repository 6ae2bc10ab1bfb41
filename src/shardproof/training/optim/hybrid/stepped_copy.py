"""The tensor that a sub-optimizer steps instead of a parameter of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardproof.engine.state import local_tensor
from shardproof.training.optim.hybrid.transfers import CopyEvent, Event, Transfers
from shardproof.training.optim.parameter_values import gradient_of, local_gradient, refreshed


class SteppedCopy:
    """A parameter and the plain tensor that a sub-optimizer steps for it.

    On the device, without a master, the tensor shares the parameter's memory. Otherwise it has separate
    memory: on the CPU, or in the master's dtype, or both. Then each step writes the parameter from the
    tensor, and `refresh` writes the tensor from the parameter after a write by other code.

    Args:
        parameter: the program's parameter.
        group: the program's group of the parameter.
        on_cpu: True for the CPU's side.
        master_dtype: dtype of the master, or None for no master.
        transfers: copies between the parameter's device and the host.
        pin: True to allocate page-locked host memory.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        *,
        on_cpu: bool,
        master_dtype: torch.dtype | None,
        transfers: Transfers,
        pin: bool,
    ) -> None:
        local = local_tensor(parameter).detach()
        self.parameter = parameter
        self.on_cpu = on_cpu
        self.has_master = master_dtype is not None
        self.transfers = transfers
        self.optimizer: Any = None
        """The sub-optimizer that steps `tensor`."""
        self.group = group
        self._pin = pin and on_cpu
        self._gradient: torch.Tensor | None = None
        self._outgoing: torch.Tensor | None = None
        self.sent: Event = CopyEvent()
        """CPU side: the event of the last copy to the parameter."""
        self.tensor = local
        if self.owns_memory:
            if local.is_meta:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is on the meta device and has no values "
                    "to copy: call to_empty and initialise it, then make the optimizer"
                )
            device = torch.device("cpu") if on_cpu else local.device
            self.tensor = self._buffer(master_dtype or local.dtype, device).copy_(local)
        self._seen = self._now()

    @property
    def owns_memory(self) -> bool:
        """True if the tensor does not share the parameter's memory."""
        return self.on_cpu or self.has_master

    @property
    def local(self) -> torch.Tensor:
        """The local tensor of the parameter."""
        return local_tensor(self.parameter).detach()

    def gradient(self) -> torch.Tensor | None:
        """The local gradient for the step."""
        gradient = gradient_of(self.parameter)
        return None if gradient is None else local_gradient(gradient, self.parameter)

    def cast_gradient(self, gradient: torch.Tensor) -> None:
        """Device side: set the gradient. See "The device's own gradients stay on main"."""
        self.tensor.grad = gradient.detach().to(self.tensor.dtype)

    def host_gradient(self) -> torch.Tensor:
        """CPU side: the memory of the gradient."""
        if self._gradient is None:
            self._gradient = self._buffer(self.tensor.dtype)
        return self._gradient

    def outgoing(self, local: torch.Tensor) -> torch.Tensor:
        """CPU side: the stepped values, rounded to the dtype of the local tensor for a device."""
        if local.device.type == "cpu" or local.dtype == self.tensor.dtype:
            return self.tensor
        if self._outgoing is None:
            self._outgoing = self._buffer(local.dtype)
        return self._outgoing.copy_(self.tensor)

    def write_back(self) -> None:
        """Device side: round the master into the parameter."""
        if self.has_master:
            self.local.copy_(self.tensor)

    @staticmethod
    def mark_stepped(copies: Sequence[SteppedCopy]) -> None:
        """Record the optimizer's own writes, which `refresh` ignores."""
        torch.autograd.graph.increment_version([stepped.parameter for stepped in copies])
        for stepped in copies:
            stepped._seen = stepped._now()

    def refresh(self) -> None:
        """Update the tensor after a write to the parameter by other code, such as a load of the model alone.

        An element of a master stays exact if it rounds to the parameter's element.
        """
        now = self._now()
        if now == self._seen:
            return
        if self.owns_memory:
            self.take_values(self._refreshed() if self.has_master else self.local)
        elif now[2] != self.tensor.data_ptr() or self.local.device != self.tensor.device:
            self.tensor.data = self.local  # the module was moved
        self._seen = now

    def values(self) -> torch.Tensor:
        """The values that `refresh` would give, in new memory."""
        return self._refreshed() if self.has_master else self.local.to(self.tensor.device, copy=True)

    def current(self) -> torch.Tensor:
        """The tensor, or new memory with the values that `refresh` would give."""
        return self.tensor if self._now() == self._seen else self.values()

    def take_values(self, values: torch.Tensor) -> None:
        """Copy values into the tensor, and take them as those of the parameter."""
        self.sent.synchronize()
        self.tensor.copy_(values)
        self._seen = self._now()

    def forget(self) -> None:
        """Make the next `refresh` read the parameter."""
        self._seen = (-1, -1, -1)

    def _refreshed(self) -> torch.Tensor:
        """The master in new memory, with the elements that other code has written."""
        return refreshed(self.tensor, self.local.to(self.tensor.device))

    def _now(self) -> tuple[int, int, int]:
        """A version that changes with every write that torch counts, and with other memory."""
        parameter = self.parameter
        version, local = parameter._version, local_tensor(parameter)
        return version, version if local is parameter else local._version, local.data_ptr()

    def _buffer(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory of the tensor's shape, page-locked on the CPU's side if the program asks for it."""
        return torch.empty(self.tensor.shape, dtype=dtype, device=device, pin_memory=self._pin)


def master_dtype_of(dtype: torch.dtype, master: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the master, or None if the parameter needs no master."""
    if master is None or not dtype.is_floating_point or torch.promote_types(dtype, master) == dtype:
        return None
    return master
