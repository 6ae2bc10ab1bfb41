"""The tensor that a sub-optimizer steps in place of a parameter of the program."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.optim.hybrid.transfers import Transfers
from shardproof.optim.parameter_values import gradient_of, local_gradient, refreshed
from shardproof.state import local_tensor

__all__ = ["SteppedCopy", "master_dtype_of"]


class SteppedCopy:
    """A parameter and the plain tensor that is stepped for it.

    On the device, without a master, the copy is the parameter's own memory. Else it is memory of its own: on
    the CPU, or in the master's dtype, or both. Then the parameter is written from the copy after each step,
    and the copy from the parameter whenever somebody else has written to that (see `refresh`).

    Args:
        parameter: the program's.
        on_cpu: the side.
        master_dtype: of the master, or None for no master.
        transfers: between the parameter's device and the host.
        pin: allocate the host's side page-locked.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
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
        self.group: dict[str, Any] = {}
        """The program's group that the parameter is in."""
        self._pin = pin
        self._gradient: torch.Tensor | None = None
        self._outgoing: torch.Tensor | None = None
        self._arrived = transfers.event()
        self._sent = transfers.event()
        self.tensor = self._own(local, master_dtype or local.dtype) if self.owns_memory else local
        self._seen = self._now()

    @property
    def owns_memory(self) -> bool:
        """Whether the copy has memory of its own."""
        return self.on_cpu or self.has_master

    @property
    def local(self) -> torch.Tensor:
        """What the rank holds of the parameter."""
        return local_tensor(self.parameter).detach()

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """New memory beside the copy's, zeros; of its shape if no other is given."""
        return torch.zeros(
            self.tensor.shape if shape is None else shape, dtype=dtype, device=self.tensor.device
        )

    def gradient(self) -> torch.Tensor | None:
        """The rank's part of the gradient to step with."""
        gradient = gradient_of(self.parameter)
        return None if gradient is None else local_gradient(gradient, self.parameter).detach()

    def cast_gradient(self, gradient: torch.Tensor) -> None:
        """Device side: give the copy its gradient. See "The device's own gradients stay on main"."""
        self.tensor.grad = gradient.to(self.tensor.dtype)

    def fetch_gradient(self, gradient: torch.Tensor) -> None:
        """CPU side: start the gradient's way to the host. See "Down waits for main"."""
        if gradient.layout != torch.strided:
            raise ValueError("a sparse gradient cannot go to the CPU side: use cpu_fraction=0 for it")
        if self._gradient is None:
            self._gradient = self._buffer(self.tensor.dtype)
        self.transfers.down(self._gradient, gradient, self._arrived)

    def await_gradient(self) -> None:
        """CPU side: let the copy be stepped. See the notes on what the host waits for."""
        self._arrived.synchronize()
        self._sent.synchronize()
        self.tensor.grad = self._gradient

    def drop_gradient(self) -> None:
        """The step is over: the next one begins without a gradient."""
        self.tensor.grad = None

    def send(self) -> None:
        """CPU side: start the parameter's way back, in its own dtype."""
        local = self.local
        outgoing = self.tensor
        if local.device.type != "cpu" and local.dtype != outgoing.dtype:
            if self._outgoing is None:
                self._outgoing = self._buffer(local.dtype)
            outgoing = self._outgoing.copy_(self.tensor)
        self.transfers.up(local, outgoing, self._sent)

    def write_back(self) -> None:
        """Device side: the parameter takes its master's values."""
        if self.has_master:
            self.local.copy_(self.tensor)

    def mark_stepped(self) -> None:
        """What has been written to the parameter since `refresh` was our own doing."""
        torch.autograd.graph.increment_version(self.parameter)
        self._seen = self._now()

    def refresh(self) -> None:
        """Take the parameter's values where somebody else has written to it (a model-only load).

        A master takes an element only if, rounded to the parameter's dtype, it is not the parameter's: what
        is the same stays exact.
        """
        now = self._now()
        if now == self._seen:
            return
        if not self.owns_memory:
            if now[2] != self.tensor.data_ptr() or self.local.device != self.tensor.device:
                self.tensor.data = self.local  # the module was moved
        else:
            self.take_parameter(only_changed=self.has_master)
        self._seen = now

    def take_parameter(self, *, only_changed: bool = False) -> None:
        """The copy's memory becomes what the parameter holds."""
        self.take_values(self._refreshed() if only_changed else self.local)

    def values(self) -> torch.Tensor:
        """What the copy holds after `refresh`, in new memory on its side."""
        return self._refreshed() if self.has_master else self.local.to(self.tensor.device, copy=True)

    def current(self) -> torch.Tensor:
        """What the copy holds, or will after `refresh` where somebody else has written to the parameter."""
        return self.tensor if self._now() == self._seen else self.values()

    def take_values(self, values: torch.Tensor) -> None:
        """The copy's memory becomes `values`, and the parameter is not asked."""
        self._sent.synchronize()
        self.tensor.copy_(values)
        self._seen = self._now()

    def forget(self) -> None:
        """Whatever the parameter holds was written by somebody else."""
        self._seen = (-1, -1, -1)

    def _refreshed(self) -> torch.Tensor:
        """A master's values, in new memory, with those elements that somebody else has written."""
        return refreshed(self.tensor, self.local.to(self.tensor.device))

    def _now(self) -> tuple[int, int, int]:
        """Changes with every write to the parameter that torch counts, and when it gets other memory."""
        local = local_tensor(self.parameter)
        return self.parameter._version, local._version, local.data_ptr()

    def _own(self, local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if local.device.type == "meta":
            raise ValueError(
                f"a parameter of shape {list(self.parameter.shape)} has no values yet (device meta) to make "
                "a copy or master of: call to_empty and initialise it, then make the optimizer"
            )
        if self.on_cpu:
            return self._buffer(dtype, local.shape).copy_(local)
        return torch.empty(local.shape, dtype=dtype, device=local.device).copy_(local)

    def _buffer(self, dtype: torch.dtype, shape: torch.Size | None = None) -> torch.Tensor:
        """Host memory that copies to and from the device go through."""
        return torch.empty(
            self.tensor.shape if shape is None else shape,
            dtype=dtype,
            device="cpu",
            pin_memory=self._pin and self.on_cpu,
        )


def master_dtype_of(dtype: torch.dtype, master: torch.dtype | None) -> torch.dtype | None:
    """The master's dtype, None where the parameter needs no master."""
    if master is None or not dtype.is_floating_point or torch.promote_types(dtype, master) == dtype:
        return None
    return master
