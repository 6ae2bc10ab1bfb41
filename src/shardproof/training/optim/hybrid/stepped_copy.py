"""The tensor that a sub-optimizer steps instead of a parameter, and its copies from and to the device.

The copies between a device and the host overlap the steps on both.

A device has three streams. The *main* stream is current when the program calls `step`, and backward ran on
it. The *down* stream copies gradients to the host. The *up* stream copies parameters to the device. The host
waits for single events, never for a stream or a device.

Note: Down waits for main
    `step` first redistributes gradients whose sharding differs from their parameter's. Main then records an
    event, the mark. A gradient is complete when main reaches the mark. Down waits for the mark and for
    nothing later, so it overlaps the device's step, which follows on main. The device's step does not access
    the memory that down reads, because each parameter is on one side only.

Note: The host waits for the gradients of one bucket
    Each bucket of parameters has its own event, which down records after the copies of the bucket's
    gradients. The host waits for it right before it steps the bucket, while later copies continue. The
    destination buffers are free, because their only reader, the host's previous step, has finished. `step`
    keeps a redistributed gradient alive until it ends. When `step` returns, the host has waited for every
    event of down. The program may then free or zero gradients without `record_stream` on down. After an
    error, main waits for down.

Note: Up waits for main
    Forward and backward, enqueued on main before the mark, read the parameters that up overwrites. The
    host's wait for a copied gradient implies that they are done. A gradient that is already on the host needs
    no copy, so up waits for the mark itself.

Note: Main waits for up
    Work after `step` on main reads the new parameters. Before `step` returns, it makes main wait for up. The
    host does not wait.

Note: The host waits for a sent bucket
    A copy up may still be reading the host's tensors after `step` has returned. The next step, a load or a
    refresh writes to them again. Before it does, the host waits for the event that up recorded after the
    copies of the bucket.

Note: The device's own gradients stay on main
    Where the device steps an fp32 master, its gradient is cast on main, right before the step that reads
    it. Both run on main, so they need no event.

Without an accelerator, or with overlap off, each copy is complete when its call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from shardproof._utils.accelerator import is_on_accelerator, on_stream
from shardproof.engine.state import local_tensor
from shardproof.training.optim.parameter_values import gradient_of, local_gradient, refreshed

_Tensors: TypeAlias = list[torch.Tensor]


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


class CopyEvent:
    """A point in a queue of copies. Here, the copies before it are always complete."""

    def synchronize(self) -> None:
        """Blocks the host until the copies before this point are complete."""


Event: TypeAlias = CopyEvent | torch.Event


class Transfers:
    """Copies between the host and one device. Here, each copy is complete when its call returns.

    The notes above state what each call of `SideStreams` waits for.
    """

    def event(self) -> Event:
        """An event for one bucket, reused at each step. A wait before its first record returns at once."""
        return CopyEvent()

    def begin(self) -> None:
        """Records the mark on main."""

    def down(self, destinations: _Tensors, sources: _Tensors, event: Event) -> None:
        """Copies tensors to the host."""
        torch._foreach_copy_(destinations, sources)

    def up(self, destinations: _Tensors, sources: _Tensors, event: Event) -> None:
        """Copies tensors to the device."""
        torch._foreach_copy_(destinations, sources)

    def end(self) -> None:
        """Makes main wait for the copies."""


class SideStreams(Transfers):
    """Copies on two side streams of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)

    def event(self) -> torch.Event:
        """An event of the device."""
        return torch.Event(self._device)

    def begin(self) -> None:
        """See "Down waits for main" and "Up waits for main"."""
        mark = torch.accelerator.current_stream(self._device).record_event()
        self._down.wait_event(mark)
        self._up.wait_event(mark)

    def down(self, destinations: _Tensors, sources: _Tensors, event: Event) -> None:
        """Enqueues copies to the host. Down casts dtypes on the device."""
        self._enqueue(self._down, destinations, sources, event)

    def up(self, destinations: _Tensors, sources: _Tensors, event: Event) -> None:
        """Enqueues copies to the device."""
        self._enqueue(self._up, destinations, sources, event)

    def end(self) -> None:
        """See "Main waits for up". Down is complete, unless an error ended the step early."""
        main = torch.accelerator.current_stream(self._device)
        main.wait_stream(self._down)
        main.wait_stream(self._up)

    def _enqueue(self, stream: torch.Stream, destinations: _Tensors, sources: _Tensors, event: Event) -> None:
        assert isinstance(event, torch.Event)
        with on_stream(stream, self._device):
            torch._foreach_copy_(destinations, sources, non_blocking=True)
            event.record(stream)


def transfers_for(device: torch.device, overlap: bool) -> Transfers:
    """The transfers of one device: on side streams if it is an accelerator and `overlap` is true."""
    if overlap and is_on_accelerator(device):
        return SideStreams(device)
    return Transfers()
