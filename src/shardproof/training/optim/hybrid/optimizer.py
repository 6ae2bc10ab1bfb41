"""The public class of the hybrid optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch

from shardproof.engine.state import EXECUTION_OPTIONS, ParameterSlots, Receipt, StoredSlot, options_of
from shardproof.errors import StructureError
from shardproof.training.optim.hybrid import parameter_slots
from shardproof.training.optim.hybrid.sides import CpuBucket, DeviceSplit, Rules, SubOptimizers
from shardproof.training.optim.hybrid.stepped_copy import (
    SteppedCopy,
    Transfers,
    master_dtype_of,
    transfers_for,
)
from shardproof.training.optim.parameter_values import gradient_of
from shardproof.training.optim.schema import Spec, check_slots


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Updates a fraction of the parameters on the CPU and the rest on the device, at the same time.

    The CPU's part of the state is in host memory. The CPU steps its parameters in buckets: small parameters
    together, a large one alone. Three operations overlap the step of a bucket: copies of later gradients to
    the host, copies of earlier parameters to the device, and the step of the device's part. The CPU steps
    torch's Adam, AdamW, SGD and Adagrad with ``fused=True`` unless an option selects ``fused`` or
    ``foreach``. A fused step rounds in another way than the loop that these classes use by default.

    `DeviceSplit` selects the parameters of the CPU's part from the order and the global shapes of the
    parameters. A parameter that does not require a gradient has no copy, no master and no slots, and does not
    count in `cpu_fraction`. The first step after it is unfrozen assigns it to a side. Without an accelerator,
    the CPU's part still uses copies, so that the code path is the same.

    Parameters may be DTensors (FSDP2, tensor parallel). Each rank steps its local tensors, which may be
    empty. A parameter without a gradient is not stepped. ``parameter.decoupled_grad``, if set, replaces
    ``grad`` and may have any dtype. The keys of `state` and the tensors of `param_groups` are the program's
    parameters.

    The optimizer detects writes to a parameter between two steps by torch's version counter, for example a
    load in place or a clamp under `torch.no_grad`. It then refreshes copies and masters. The counter does not
    count writes through ``parameter.data``: call `refresh` after one.

    Args:
        params: parameters, or groups of them, as for any torch optimizer.
        optimizer_class: optimizer of the device's part: a class of torch optimizers, or a
            `functools.partial` of one.
        cpu_optimizer_class: optimizer of the CPU's part; None for the same class.
        cpu_fraction: part of the elements to update on the CPU, from 0 to 1. Each parameter is on one side.
        overlap: True to copy on side streams, False to copy on the current stream.
        pin_memory: page-locked memory for the CPU side's copies and gradients, which copies need to overlap
            other work. No effect without an accelerator.
        master_dtype: parameters of a narrower floating dtype are stepped as masters of this dtype (float32),
            on both sides. None: no masters.
        state_dtypes: dtypes in which to store slots, such as ``{"exp_avg": torch.bfloat16}``. A step converts
            these slots to its own dtype: on the CPU one bucket at a time, on the device all together.
        device: expected device of the parameters; None for no check.
        **options: options of the optimizer, for example ``lr`` and ``betas``; defaults for groups. The CPU's
            class gets the options that it accepts.

    Raises:
        ValueError: a fraction outside [0, 1], a parameter on another device or without values, a class
            that calls its closure more than once (L-BFGS), `state_dtypes` for an unknown slot, or a sharded
            parameter with a class that is not elementwise (see `slot_schema`).

    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = HybridDeviceOptimizer(model.parameters(), torch.optim.AdamW, cpu_fraction=0.5, lr=0.1)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> [name for name, weight in model.named_parameters() if optimizer.is_on_cpu(weight)]
    ['weight']
    >>> sorted(optimizer.state[model.weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        cpu_optimizer_class: Callable[..., torch.optim.Optimizer] | None = None,
        cpu_fraction: float = 0.5,
        overlap: bool = True,
        pin_memory: bool = False,
        master_dtype: torch.dtype | None = None,
        state_dtypes: Mapping[str, torch.dtype] | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        self._split = DeviceSplit(cpu_fraction)
        self._overlap = overlap
        self._pin = pin_memory and torch.accelerator.is_available()
        self._master_dtype = master_dtype
        self._device = None if device is None else torch.device(device)
        self._copies: dict[torch.Tensor, SteppedCopy] = {}
        self._frozen: dict[torch.Tensor, dict[str, Any]] = {}
        """Parameters without a copy, with their groups."""
        self._transfers: dict[torch.device, Transfers] = {}
        self._rules = Rules(optimizer_class, cpu_optimizer_class or optimizer_class, options)
        self._state_dtypes = dict(state_dtypes or {})
        self._subs = SubOptimizers(self._rules, self._state_dtypes)
        super().__init__(params, self._rules.defaults)
        if self._state_dtypes:
            schemas = [self._schema(stepped, options_of(stepped.group)) for stepped in self._copies.values()]
            check_slots(self._state_dtypes, schemas or self._rules.default_schemas())

    @property
    def cpu_fraction(self) -> float:
        """The requested part of the elements on the CPU."""
        return self._split.fraction

    def is_on_cpu(self, parameter: torch.Tensor) -> bool:
        """Return True if a parameter is updated on the CPU. False for a parameter that was always frozen."""
        if parameter in self._frozen:
            return False
        return self._copy_of(parameter).on_cpu

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Existing parameters stay on their sides.

        Args:
            param_group: ``params`` and options, as for any torch optimizer.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        frozen = {parameter: group for parameter in group["params"] if _is_frozen(parameter)}
        try:
            for parameter in group["params"]:
                if self._device is not None and parameter.device.type != self._device.type:
                    raise ValueError(
                        f"a parameter of shape {list(parameter.shape)} is on {parameter.device}, not on "
                        f"{self._device}: move the model first, or omit device="
                    )
            self._add_copies(group, [item for item in group["params"] if item not in frozen])
        except BaseException:
            self.param_groups.pop()
            raise
        self._frozen.update(frozen)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        The call completes the CPU's part and enqueues the device's part and the copies. Later work on the
        current stream reads the new parameters. The host does not wait for the device.

        Args:
            closure: computes the gradients and returns the loss; called once.

        Returns:
            The loss of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._add_unfrozen()
        self._subs.push_options()
        self.refresh()
        each = ((stepped, stepped.gradient()) for stepped in self._copies.values())
        # Each in the layout of its copy. This frame keeps the CPU side's until the step ends.
        gradients = {stepped: gradient for stepped, gradient in each if gradient is not None}
        # After the redistribution of gradients: see "Down waits for main".
        for transfers in self._transfers.values():
            transfers.begin()
        try:
            on_device, on_cpu = self._start_gradients(gradients)
            if on_device:
                self._subs.step_device(on_device, self.state)
            for stepped in on_device:
                stepped.write_back()
            SteppedCopy.mark_stepped(on_device)
            for bucket, copies in on_cpu:
                bucket.await_gradients()
                self._subs.step_bucket(bucket, copies, self.state)
                bucket.send(copies)
                SteppedCopy.mark_stepped(copies)
        finally:
            for transfers in self._transfers.values():
                transfers.end()
            for stepped in self._copies.values():
                if not stepped.on_cpu:  # buckets clear their own
                    stepped.tensor.grad = None
            gradients.clear()  # because an exception's traceback keeps this frame alive
        self._subs.pull_options()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including ``decoupled_grad``."""
        super().zero_grad(set_to_none)
        for parameter in (*self._copies, *self._frozen):
            gradient = getattr(parameter, "decoupled_grad", None)
            if gradient is None:
                continue
            if set_to_none:
                parameter.decoupled_grad = None  # type: ignore[attr-defined]
            else:
                gradient.zero_()

    @torch.no_grad()
    def refresh(self, *, uncounted: bool = False) -> None:
        """Update copies and masters after writes to the parameters. Each step calls it first.

        Args:
            uncounted: also update for writes that torch's version counter does not count.
        """
        for stepped in self._copies.values():
            if uncounted:
                stepped.forget()
            stepped.refresh()

    def describe_slots(self) -> Iterable[ParameterSlots]:
        """See `SlotProvider`. Trained parameters always have masters, and other slots after a step."""
        for group in self.param_groups:
            options = options_of(group)
            for parameter in group["params"]:
                if parameter in self._frozen:
                    yield ParameterSlots(parameter, self._rules.kind(False), options, {}, {})
                    continue
                stepped = self._copy_of(parameter)
                state = self.state.get(parameter) or {}
                yield parameter_slots.describe(stepped, state, self._rules.kind(stepped.on_cpu), options)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """See `SlotProvider`. Loads state of any fraction, and of a plain optimizer.

        A frozen parameter gets a copy if the checkpoint has slots of it: an earlier run trained it.
        """
        if parameter in self._frozen:
            if not stored:
                return Receipt(self._rules.kind(False), {}, lambda values, filled: None)
            self._add_copies(self._frozen[parameter], [parameter])
        stepped = self._copy_of(parameter)
        options = options_of(stepped.group)
        schema = partial(self._schema, stepped, options)
        return parameter_slots.receive(
            stepped, self.state, self._rules.kind(stepped.on_cpu), options, stored, schema
        )

    def describe_shared(self) -> dict[str, Any]:
        """See `SlotProvider`. There is no shared state."""
        return {}

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """See `SlotProvider`. Refuses any shared state."""
        if state:
            raise StructureError(
                f"HybridDeviceOptimizer has no state besides slots, but the checkpoint has {sorted(state)}"
            )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """This rank's state in torch's form, by position, with the masters as slots ``"master"``.

        It loads at any fraction, but only in the same layout. To load on another number of ranks, pass the
        optimizer to `shardproof.save` and `shardproof.load`.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return parameter_slots.with_masters(super().state_dict(), list(map(self._copies.get, parameters)))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of a hybrid optimizer at any fraction, or of a plain optimizer of the class.

        A missing master is made from the parameter, so load the model first. Masters and fp32 values are
        copied without a cast. Options that say how a step is computed (``fused``, ``foreach``) do not change.
        Hooks for loading are not called.

        Args:
            state_dict: a state dict in torch's form.

        Raises:
            ValueError: its groups or shapes differ from this optimizer's. Nothing has changed then.
        """
        receipts = parameter_slots.receipts(state_dict, self.param_groups, self.receive_slots)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(deepcopy(options_of(saved, EXECUTION_OPTIONS)))
        for attach in receipts:
            attach()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "HybridDeviceOptimizer cannot be copied or pickled: use state_dict(), or shardproof.save"
        )

    def _add_unfrozen(self) -> None:
        """Adds copies of the parameters that were frozen and have to be stepped."""
        for group in self.param_groups if self._frozen else ():
            found = [
                parameter
                for parameter in group["params"]
                if parameter in self._frozen
                and (not _is_frozen(parameter) or gradient_of(parameter) is not None)
            ]
            if found:
                self._add_copies(group, found)

    @torch.no_grad()
    def _add_copies(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Assigns parameters of a group to sides. After an error, nothing has changed."""
        saved_split = replace(self._split)
        try:
            copies = [self._new_copy(parameter, group) for parameter in parameters]
            self._subs.add(group, copies)
        except BaseException:
            self._split = saved_split
            raise
        self._copies.update((stepped.parameter, stepped) for stepped in copies)
        for parameter in parameters:
            self._frozen.pop(parameter, None)

    def _new_copy(self, parameter: torch.Tensor, group: dict[str, Any]) -> SteppedCopy:
        device = parameter.device
        if device not in self._transfers:
            self._transfers[device] = transfers_for(device, self._overlap)
        stepped = SteppedCopy(
            parameter,
            group,
            on_cpu=self._split.on_cpu(parameter),
            master_dtype=master_dtype_of(parameter.dtype, self._master_dtype),
            transfers=self._transfers[device],
            pin=self._pin,
        )
        self._rules.check_shard(stepped.on_cpu, options_of(group), parameter, stepped.tensor)
        return stepped

    def _schema(self, stepped: SteppedCopy, options: dict[str, Any]) -> dict[str, Spec]:
        """The slots of a parameter, in the dtypes in which they are stored."""
        return {
            slot: replace(spec, dtype=self._state_dtypes.get(slot, spec.dtype))
            if spec.kind == "elements"
            else spec
            for slot, spec in self._rules.schema(stepped.on_cpu, options, stepped.tensor).items()
        }

    def _copy_of(self, parameter: torch.Tensor) -> SteppedCopy:
        if parameter not in self._copies:
            raise ValueError(f"a tensor of shape {list(parameter.shape)} is no parameter of this optimizer")
        return self._copies[parameter]

    def _start_gradients(
        self, gradients: dict[SteppedCopy, torch.Tensor]
    ) -> tuple[list[SteppedCopy], list[tuple[CpuBucket, list[SteppedCopy]]]]:
        """Set the gradients of the device's copies, and start to copy those of the CPU's copies to the host.

        Removes the device's gradients from `gradients`, so that their memory can be freed.

        Returns:
            The device's copies that have a gradient, and the CPU's, by bucket.
        """
        fetched = [(bucket, bucket.fetch(gradients)) for bucket in self._subs.buckets]
        on_device = [stepped for stepped in gradients if not stepped.on_cpu]
        for stepped in on_device:
            stepped.cast_gradient(gradients.pop(stepped))
        return on_device, [(bucket, copies) for bucket, copies in fetched if copies]


def _is_frozen(parameter: torch.Tensor) -> bool:
    """True if the program excludes the parameter from training. A plain tensor may get gradients by hand."""
    return isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad
