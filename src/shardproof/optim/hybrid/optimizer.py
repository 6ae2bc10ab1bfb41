"""The optimizer that programs use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch

from shardproof.errors import StructureError
from shardproof.optim.hybrid import parameter_slots
from shardproof.optim.hybrid.device_split import Sides
from shardproof.optim.hybrid.rules import Rules
from shardproof.optim.hybrid.stepped_copy import Twin, master_dtype_of
from shardproof.optim.hybrid.sub_optimizers import SubOptimizers
from shardproof.optim.hybrid.transfers import Traffic, traffic_of
from shardproof.optim.schema import Spec, check_slots
from shardproof.state import ParameterSlots, Receipt, StoredSlot, options_of

__all__ = ["HybridDeviceOptimizer"]


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Updates a fraction of the parameters on the CPU and the rest on the device, at the same time.

    State of the CPU's part lies in host memory, so the device is spared as many bytes. Each parameter of
    the CPU's part is an optimizer step of its own: its gradient is on its way down while those before it are
    stepped, and its new value on its way up while those behind it are. The device steps its part meanwhile.

    Which parameters go to the CPU: see `Sides`; it depends on the order and the global shapes of the
    parameters alone. Without an accelerator the CPU side is a copy all the same, so that everything runs as
    it would with one.

    Parameters may be DTensors (FSDP2, tensor parallel); each rank steps what it holds, be it empty. A
    parameter without a gradient is not stepped. ``parameter.decoupled_grad``, where set, is used in place of
    ``grad``, in any dtype. `state` and `param_groups` are by the program's own parameters, for schedulers and
    for people.

    Writes to a parameter between two steps are seen by the version counter that torch keeps (a load in place,
    a clamp under `torch.no_grad`), and copies and masters follow. Writes through ``parameter.data`` are not
    counted: call `refresh` after one.

    Args:
        params: parameters, or groups of them, as for any torch optimizer.
        optimizer_class: steps the device's part: any class of torch optimizers, or a `functools.partial` of
            one.
        cpu_optimizer_class: steps the CPU's part; by default the same class.
        cpu_fraction: part of the elements to update on the CPU, from 0 to 1. Parameters are not cut.
        overlap: copy on side streams. False: copy in place, on the current stream.
        pin_memory: page-locked memory for the CPU side's copies and gradients, without which a device does
            not copy beside other work. No effect where there is no accelerator.
        master_dtype: parameters of a narrower floating dtype are stepped as masters of this dtype (float32),
            on either side. None: no masters.
        state_dtypes: dtypes by slot, such as ``{"exp_avg": torch.bfloat16}``: kept so, and raised for the
            step to the dtype that is stepped in: the CPU's one parameter at a time, the device's together.
        device: where the parameters are, to have it checked. None: wherever they are.
        **options: of the optimizer, for example ``lr`` and ``betas``; defaults for groups. The CPU's class
            gets those that it knows.

    Raises:
        ValueError: a fraction outside [0, 1], a parameter on another device or without values, a class
            that needs its closure more than once (L-BFGS), or `state_dtypes` for a slot that it has not.

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
        self._sides = Sides(cpu_fraction)
        self._overlap = overlap
        self._pin = pin_memory and torch.accelerator.is_available()
        self._master_dtype = master_dtype
        self._device = None if device is None else torch.device(device)
        self._twins: dict[torch.Tensor, Twin] = {}
        self._traffic: dict[torch.device, Traffic] = {}
        self._rules = Rules(optimizer_class, cpu_optimizer_class or optimizer_class, options)
        self._state_dtypes = dict(state_dtypes or {})
        self._subs = SubOptimizers(self._rules, self._state_dtypes)
        super().__init__(params, self._rules.defaults)
        if self._state_dtypes:
            check_slots(
                self._state_dtypes,
                [self._schema(twin, options_of(twin.group)) for twin in self._twins.values()],
            )

    @property
    def cpu_fraction(self) -> float:
        """The part of the elements that was asked to be on the CPU."""
        return self._sides.fraction

    def is_on_cpu(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is updated on the CPU."""
        return self._twin(parameter).on_cpu

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those that were there stay on their sides.

        Args:
            param_group: ``params`` and options, as for any torch optimizer.
        """
        super().add_param_group(param_group)
        sides = replace(self._sides)
        try:
            self._adopt(self.param_groups[-1])
        except BaseException:
            self._sides = sides
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        When it returns, the CPU's part is done, and the device's part and the copies are enqueued in such a
        way that what follows on the current stream sees the new parameters. The device is not waited for.

        Args:
            closure: computes the gradients and returns the loss; called once.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._subs.tell()
        self.refresh()
        gradients = self._gradients()
        for traffic in self._traffic.values():  # behind what lays gradients out: see "Down waits for main"
            traffic.begin()
        try:
            on_device, on_cpu = self._start_gradients(gradients)
            self._step_device(on_device)
            for twin in on_cpu:
                twin.await_gradient()
                self._subs.step(twin.optimizer, [twin], self.state)
                twin.send()
                twin.stepped()
        finally:
            for traffic in self._traffic.values():
                traffic.end()
            for twin in self._twins.values():
                twin.drop_gradient()
            gradients.clear()  # also where an error keeps this frame
        self._subs.hear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, decoupled ones too."""
        super().zero_grad(set_to_none)
        for parameter in self._twins:
            gradient = getattr(parameter, "decoupled_grad", None)
            if gradient is None:
                continue
            if set_to_none:
                parameter.decoupled_grad = None  # type: ignore[attr-defined]
            else:
                gradient.zero_()

    @torch.no_grad()
    def refresh(self, *, uncounted: bool = False) -> None:
        """Let copies and masters follow what others have written to the parameters. Each step begins with it.

        Args:
            uncounted: look at all parameters, also where torch's version counter says that nothing was
                written.
        """
        for twin in self._twins.values():
            if uncounted:
                twin.forget()
            twin.refresh()

    def describe_slots(self) -> Iterable[ParameterSlots]:
        """See `SlotKeeper`. Masters are there from the start, other slots after a parameter's first step."""
        for group in self.param_groups:
            options = options_of(group)
            for parameter in group["params"]:
                twin = self._twin(parameter)
                state = self.state.get(parameter) or {}
                yield parameter_slots.describe(twin, state, self._rules.kind(twin.on_cpu), options)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """See `SlotKeeper`. State saved at another fraction, or by a plain optimizer, fits."""
        twin = self._twin(parameter)
        options = options_of(twin.group)
        schema = partial(self._schema, twin, options)
        return parameter_slots.receive(
            twin, self.state, self._rules.kind(twin.on_cpu), options, stored, schema
        )

    def describe_shared(self) -> dict[str, Any]:
        """Nothing: all is by parameter."""
        return {}

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Another optimizer's values beside the parameters' are not ours."""
        if state:
            raise StructureError(
                f"HybridDeviceOptimizer keeps nothing beside its slots, but {sorted(state)} was stored"
            )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Torch's form, with the masters as slots ``"master"``: what this rank holds, by position.

        For `torch.save` on one process and for libraries that know nothing else. It fits any fraction, a
        plain optimizer's fits too, but it belongs to one layout: to load on other ranks or sizes, hand the
        optimizer to `shardproof.save` and `shardproof.load`.
        """
        return parameter_slots.with_masters(super().state_dict(), list(self._twins.values()))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave: here, at another fraction, or of a plain optimizer of the same class.

        A master that is not there is made from the parameter: load the model first. Masters and fp32 values
        are copied as they are, and cast to nothing else. Hooks registered for loading are not called.

        Args:
            state_dict: torch's form.

        Raises:
            ValueError: its groups or shapes are not this optimizer's. Nothing has been changed then.
        """
        receipts = parameter_slots.receipts(state_dict, self.param_groups, self.receive_slots)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(deepcopy(options_of(saved)))
        for attach in receipts:
            attach()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "HybridDeviceOptimizer is not copied or pickled: use state_dict(), or shardproof.save"
        )

    def _adopt(self, group: dict[str, Any]) -> None:
        """Deal a group's parameters, and make the sub-optimizers of them."""
        twins = [self._new_twin(parameter) for parameter in group["params"]]
        self._subs.adopt(group, twins)
        self._twins.update((twin.parameter, twin) for twin in twins)

    def _new_twin(self, parameter: torch.Tensor) -> Twin:
        device = parameter.device
        if self._device is not None and device.type != self._device.type:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is on {device}, not on {self._device}: move "
                "the model first, or leave `device` out"
            )
        if device not in self._traffic:
            self._traffic[device] = traffic_of(device, self._overlap)
        return Twin(
            parameter,
            on_cpu=self._sides.on_cpu(parameter),
            master_dtype=master_dtype_of(parameter.dtype, self._master_dtype),
            traffic=self._traffic[device],
            pin=self._pin,
        )

    def _schema(self, twin: Twin, options: dict[str, Any]) -> dict[str, Spec]:
        """The slots of a parameter, in the dtypes that they are kept in."""
        return {
            slot: replace(spec, dtype=self._state_dtypes.get(slot, spec.dtype))
            if spec.kind == "elements"
            else spec
            for slot, spec in self._rules.schema(twin.on_cpu, options, twin.tensor.dtype).items()
        }

    def _twin(self, parameter: torch.Tensor) -> Twin:
        if parameter not in self._twins:
            raise ValueError(f"a tensor of shape {list(parameter.shape)} is no parameter of this optimizer")
        return self._twins[parameter]

    def _gradients(self) -> dict[Twin, torch.Tensor]:
        """By twin, laid out as it is; those of the CPU's have to be held until the step ends."""
        found = {twin: twin.gradient() for twin in self._twins.values()}
        return {twin: gradient for twin, gradient in found.items() if gradient is not None}

    def _start_gradients(self, gradients: dict[Twin, torch.Tensor]) -> tuple[list[Twin], list[Twin]]:
        """The device's and the CPU's twins that have a gradient, which is on its way to the CPU's.

        Those of the device's are taken out: they have theirs.
        """
        by_side: tuple[list[Twin], list[Twin]] = [], []
        for twin, gradient in gradients.items():
            by_side[twin.on_cpu].append(twin)
            if twin.on_cpu:
                twin.fetch_gradient(gradient)
        for twin in by_side[False]:
            twin.cast_gradient(gradients.pop(twin))
        return by_side

    def _step_device(self, stepped: list[Twin]) -> None:
        if stepped:
            assert self._subs.on_device is not None
            self._subs.step(self._subs.on_device, stepped, self.state)
        for twin in stepped:
            twin.write_back()
            twin.stepped()
