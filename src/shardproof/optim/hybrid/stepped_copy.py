"""The tensor that a sub-optimizer steps instead of a parameter of the program."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.optim.hybrid.transfers import Transfers
from shardproof.optim.parameter_values import gradient_of, local_gradient, refreshed
from shardproof.state import local_tensor

__all__ = ["SteppedCopy", "master_dtype_of"]


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
        self._arrived = transfers.event()
        self._sent = transfers.event()
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
        return None if gradient is None else local_gradient(gradient, self.parameter).detach()

    def cast_gradient(self, gradient: torch.Tensor) -> None:
        """Device side: set the gradient. See "The device's own gradients stay on main"."""
        self.tensor.grad = gradient.to(self.tensor.dtype)

    def fetch_gradient(self, gradient: torch.Tensor) -> None:
        """CPU side: start the copy of the gradient to the host. See "Down waits for main"."""
        if gradient.layout != torch.strided:
            raise ValueError("a sparse gradient cannot be stepped on the CPU side: use cpu_fraction=0")
        if self._gradient is None:
            self._gradient = self._buffer(self.tensor.dtype)
        self.transfers.down(self._gradient, gradient, self._arrived)

    def await_gradient(self) -> None:
        """CPU side: wait until the tensor can be stepped. See the notes on the waits of the host."""
        self._arrived.synchronize()
        self._sent.synchronize()
        self.tensor.grad = self._gradient

    def drop_gradient(self) -> None:
        """Clear the gradient after a step."""
        self.tensor.grad = None

    def send(self) -> None:
        """CPU side: start the copy to the parameter, in the parameter's dtype."""
        local = self.local
        outgoing = self.tensor
        if local.device.type != "cpu" and local.dtype != outgoing.dtype:
            if self._outgoing is None:
                self._outgoing = self._buffer(local.dtype)
            outgoing = self._outgoing.copy_(self.tensor)
        self.transfers.up(local, outgoing, self._sent)

    def write_back(self) -> None:
        """Device side: round the master into the parameter."""
        if self.has_master:
            self.local.copy_(self.tensor)

    def mark_stepped(self) -> None:
        """Record the optimizer's own write, which `refresh` ignores."""
        torch.autograd.graph.increment_version(self.parameter)
        self._seen = self._now()

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
        self._sent.synchronize()
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
        local = local_tensor(self.parameter)
        return self.parameter._version, local._version, local.data_ptr()

    def _buffer(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory of the tensor's shape, page-locked on the CPU's side if the program asks for it."""
        return torch.empty(self.tensor.shape, dtype=dtype, device=device, pin_memory=self._pin)


def master_dtype_of(dtype: torch.dtype, master: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the master, or None if the parameter needs no master."""
    if master is None or not dtype.is_floating_point or torch.promote_types(dtype, master) == dtype:
        return None
    return master
