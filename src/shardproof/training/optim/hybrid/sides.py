"""The two sides: the parameters that each one updates, its update rule, and its sub-optimizers.

The sub-optimizers share the options of the program's groups. The CPU has one for each bucket of parameters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from shardproof.engine.state import is_sharded, local_tensor, options_of
from shardproof.training.optim.hybrid.stepped_copy import SteppedCopy
from shardproof.training.optim.schema import Factory, Spec

_DEVICE_ONLY = frozenset(("capturable",))
"""Options of torch's optimizers that a step on the CPU does not support."""
_BUCKET_BYTES = 4 << 20
"""Limit of a bucket's stepped bytes. An optimizer's call takes about 60 µs, and the step of 4 MiB 1 ms."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes whose fused step runs on the CPU. A subclass may step in another way."""
_COUNTS = (torch.float32, torch.float64)
"""Dtypes of the step count in a fused step."""
Layout: TypeAlias = tuple[bool, tuple[str, ...]]
_Slots: TypeAlias = Mapping[str, Any] | None


@dataclass(slots=True)
class DeviceSplit:
    """Assigns parameters to CPU and device, so that the CPU has a fraction of the elements of every layer.

    `on_cpu` is called for each parameter in the order of the optimizer's groups. A parameter goes to the CPU
    if the CPU lacks at least half of its elements to have the fraction of all elements so far. So the CPU's
    share differs from the fraction by at most half of the largest parameter, and later parameters do not move
    earlier ones. Only global shapes count, so every rank with the same parameters assigns them equally.

    Args:
        fraction: part of the elements on the CPU, from 0 to 1.

    Raises:
        ValueError: the fraction is outside [0, 1].

    >>> sides = DeviceSplit(0.5)
    >>> [sides.on_cpu(torch.zeros(4)) for _ in range(6)]
    [True, False, True, False, True, False]
    """

    fraction: float
    seen: int = 0
    """Elements of all parameters so far."""
    taken: int = 0
    """Elements of the parameters on the CPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"cpu_fraction is {self.fraction}, not a number from 0 to 1")

    def on_cpu(self, parameter: torch.Tensor) -> bool:
        """Return True if the next parameter goes to the CPU. An empty parameter counts as one element."""
        elements = max(1, math.prod(parameter.shape))
        self.seen += elements
        chosen = self.fraction > 0 and 2 * self.taken + elements <= 2 * self.fraction * self.seen
        self.taken += elements * chosen
        return chosen


class Rules:
    """The classes of the device's and the CPU's optimizers, with their options.

    Args:
        device: class of the device's side, or a callable like it.
        cpu: class of the CPU's side. It gets the options that it accepts.
        options: keyword arguments of the device's class.

    Raises:
        ValueError: a class whose step requires a closure (L-BFGS).

    >>> Rules(torch.optim.AdamW, torch.optim.SGD, {"lr": 0.1, "betas": (0.9, 0.99)}).on_cpu.options
    {'lr': 0.1}
    """

    def __init__(
        self,
        device: Callable[..., torch.optim.Optimizer],
        cpu: Callable[..., torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        self.on_device = Factory(device, options)
        self.defaults = _checked_defaults(self.on_device)
        on_both = {name: item for name, item in options.items() if name not in _DEVICE_ONLY}
        self._schemas: dict[Any, Mapping[str, Spec] | ValueError] = {}
        self.not_of_cpu = _DEVICE_ONLY
        """Options of a group that the CPU's side does not accept."""
        if cpu is device:
            self.on_cpu = Factory(device, on_both)
        else:
            self.on_cpu = Factory(cpu, {}).accepting(on_both)
            self.not_of_cpu |= self.defaults.keys() - _checked_defaults(self.on_cpu).keys()
        self._kinds = {False: self.on_device.kind, True: self.on_cpu.kind}
        if self._kinds[False] != self._kinds[True]:
            here, there = (schema.keys() for schema in self.default_schemas())
            if here and here == there:
                self._kinds[True] = self._kinds[False]

    def kind(self, on_cpu: bool) -> str:
        """Class name of the update rule of a side.

        Two classes with the same slots (such as a fused class and torch's) count as one rule, the device's.
        """
        return self._kinds[on_cpu]

    def schema(self, on_cpu: bool, options: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Spec]:
        """The slots that a side creates for a tensor; empty if its class is not elementwise."""
        found = self._schema_or_error(on_cpu, options, like)
        return {} if isinstance(found, ValueError) else found

    def default_schemas(self) -> tuple[Mapping[str, Spec], Mapping[str, Spec]]:
        """The slots of the device's and of the CPU's class, with their default options."""
        like = torch.empty(0, dtype=torch.float32, device="cpu")
        return self.schema(False, {}, like), self.schema(True, {}, like)

    def check_shard(
        self, on_cpu: bool, options: Mapping[str, Any], parameter: torch.Tensor, like: torch.Tensor
    ) -> None:
        """Checks that a side may step a rank's part of a parameter without the other parts."""
        if not is_sharded(parameter):
            return
        found = self._schema_or_error(on_cpu, options, like)
        if isinstance(found, ValueError):
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} is sharded ({parameter.placements}), and a "  # type: ignore[attr-defined]
                f"rank cannot step its part alone: {found}"
            ) from found

    def _schema_or_error(
        self, on_cpu: bool, options: Mapping[str, Any], like: torch.Tensor
    ) -> Mapping[str, Spec] | ValueError:
        # The value of a tensor does not matter for the slots.
        texts = {
            name: "tensor" if isinstance(item, torch.Tensor) else repr(item) for name, item in options.items()
        }
        device = torch.device("cpu") if like.is_meta else like.device
        key = (on_cpu, like.dtype, device, tuple(sorted(texts.items())))
        if key not in self._schemas:
            factory = self.on_cpu if on_cpu else self.on_device
            try:
                self._schemas[key] = Factory(factory.make, {**factory.options, **options}).schema(
                    like.dtype, device
                )
            except ValueError as error:
                self._schemas[key] = error
        return self._schemas[key]


def _checked_defaults(factory: Factory) -> dict[str, Any]:
    optimizer = factory.trial()
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__qualname__} calls its closure several times a step, which two sides cannot "
            "do together: use an optimizer that steps from a gradient"
        )
    return dict(optimizer.defaults)


class GroupLink:
    """Synchronises one group of a sub-optimizer with the program's group.

    Some optimizers change an option in `step`, for example a count or an estimate. Such an option keeps the
    optimizer's value until the program sets another.
    """

    def __init__(
        self, group: dict[str, Any], inner: dict[str, Any], *, on_cpu: bool, without: Collection[str]
    ) -> None:
        self._group = group
        self._inner = inner
        self._on_cpu = on_cpu
        self._without = frozenset(without)
        self._pushed: dict[str, Any] = {}

    def push_options(self) -> None:
        """Copies the options that the program (a scheduler) changed since the last call."""
        for name, item in options_of(self._group, self._without).items():
            if name in self._pushed and _same(item, self._pushed[name]):
                continue
            if self._on_cpu and isinstance(item, torch.Tensor) and item.device.type != "cpu":
                raise ValueError(
                    f"the option {name} is a tensor on {item.device}, so each CPU step would wait for the "
                    "device: pass a number, or a tensor on the CPU"
                )
            self._inner[name] = self._pushed[name] = item

    def pull_options(self) -> None:
        """Copies the options that the step changed to the program's group."""
        for name, item in self._pushed.items():
            found = self._inner.get(name)
            if not _same(found, item):
                self._group[name] = self._pushed[name] = found


def _same(one: Any, other: Any) -> bool:
    """True if two option values are equal. Tensors, which change in place, compare by identity."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(one == other)


class SubOptimizers:
    """One optimizer for all device parameters, and one for each bucket of CPU parameters.

    The device optimizer has a group for each `add`. A bucket is stepped as soon as its gradients arrive.

    Args:
        rules: factories of the optimizers.
        dtypes: dtype in which the program's `state` stores a slot, by slot name, if it differs from the dtype
            of the step.
    """

    def __init__(self, rules: Rules, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self.on_device: torch.optim.Optimizer | None = None
        """None until the device steps a parameter."""
        self.buckets: list[CpuBucket] = []
        """The CPU's side, in the order of the parameters."""
        self._rules = rules
        self._links: dict[int, list[GroupLink]] = {}
        """By id of the program's group. Options flow back from the first link of each group."""
        self._eager: dict[SteppedCopy, dict[str, Any]] = {}
        """The sub-optimizer's group of each copy whose slots the constructor of the optimizer may make."""

    def add(self, group: dict[str, Any], copies: Sequence[SteppedCopy]) -> None:
        """Makes the optimizers for copies of parameters of one group of the program.

        The device optimizer takes the copies last: it outlives the call, and a CPU optimizer may raise.
        """
        without = self._rules.not_of_cpu
        buckets = []
        for content in cut([stepped for stepped in copies if stepped.on_cpu]):
            tensors = [stepped.tensor for stepped in content]
            optimizer = self._rules.on_cpu([{**options_of(group, without), "params": tensors}])
            if optimizer.state:
                self._eager |= dict.fromkeys(content, optimizer.param_groups[0])
            buckets.append(CpuBucket(content, optimizer))
        links = [GroupLink(group, bucket.group, on_cpu=True, without=without) for bucket in buckets]
        on_device = [stepped for stepped in copies if not stepped.on_cpu]
        if on_device:
            inner = {**options_of(group), "params": [stepped.tensor for stepped in on_device]}
            if self.on_device is None:
                self.on_device = self._rules.on_device([inner])
            else:
                self.on_device.add_param_group(inner)
            links.insert(0, GroupLink(group, self.on_device.param_groups[-1], on_cpu=False, without=()))
            if self.on_device.state:
                self._eager |= dict.fromkeys(on_device, self.on_device.param_groups[-1])
        for stepped in on_device:
            stepped.optimizer = self.on_device
        self.buckets += buckets
        self._links.setdefault(id(group), []).extend(links)

    def step_device(self, copies: Sequence[SteppedCopy], state: dict[torch.Tensor, Any]) -> None:
        """Steps the device's copies that have a gradient, with the program's `state`."""
        assert self.on_device is not None
        with self._handed_over(copies, state):
            self.on_device.step()

    def step_bucket(
        self, bucket: CpuBucket, copies: Sequence[SteppedCopy], state: dict[torch.Tensor, Any]
    ) -> None:
        """Steps the copies of a bucket that have a gradient, with the program's `state`."""
        with self._handed_over(copies, state) as states:
            bucket.step(copies, states)

    @contextmanager
    def _handed_over(
        self, copies: Sequence[SteppedCopy], state: dict[torch.Tensor, Any]
    ) -> Iterator[list[dict[str, Any] | None]]:
        states = self._hand_over(state, copies)
        try:
            yield states
        finally:
            self._take_back(state, copies)

    def _hand_over(
        self, state: Mapping[torch.Tensor, Any], copies: Sequence[SteppedCopy]
    ) -> list[dict[str, Any] | None]:
        """Gives the program's `state` to the sub-optimizer, cast to the dtype of the step.

        Returns:
            The state of each copy, None if the step makes it.
        """
        inner = copies[0].optimizer.state
        handed: list[dict[str, Any] | None] = []
        for stepped in copies:
            slots = state.get(stepped.parameter)
            if slots is None:
                inner.pop(stepped.tensor, None)
                slots = self._first_slots(stepped)
            elif self._dtypes:
                slots = _cast(slots, dict.fromkeys(self._dtypes, stepped.tensor.dtype))
            if slots is not None:
                inner[stepped.tensor] = slots
            handed.append(slots)
        return handed

    def _first_slots(self, stepped: SteppedCopy) -> dict[str, Any] | None:
        """The slots that the constructor of an optimizer makes. None if the first step makes them.

        The Adagrad of torch 2.6 makes them in the constructor alone.
        """
        if (group := self._eager.get(stepped)) is None:
            return None
        make = self._rules.on_cpu if stepped.on_cpu else self._rules.on_device
        optimizer = make([{**options_of(group), "params": [stepped.tensor]}])
        slots: dict[str, Any] | None = optimizer.state.get(stepped.tensor)
        return slots

    def _take_back(self, state: dict[torch.Tensor, Any], copies: Sequence[SteppedCopy]) -> None:
        """Moves the stepped state to the program's `state`, cast to the stored dtype."""
        inner = copies[0].optimizer.state
        for stepped in copies:
            slots = inner.get(stepped.tensor)
            if slots is not None:
                state[stepped.parameter] = _cast(slots, self._dtypes)
                if self._dtypes:
                    del inner[stepped.tensor]  # frees the memory in the step's dtype

    def push_options(self) -> None:
        """Copies the options that the program changed to all sub-optimizers."""
        for links in self._links.values():
            for link in links:
                link.push_options()

    def pull_options(self) -> None:
        """Copies the options that the steps changed to the program's groups."""
        for links in self._links.values():
            for link in links[:1]:
                link.pull_options()


def _cast(state: dict[str, Any], dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """A parameter's state with the slots that have one element per parameter element in these dtypes."""
    if not dtypes:
        return state
    return {
        slot: item.to(dtypes[slot])
        if slot in dtypes and isinstance(item, torch.Tensor) and item.dim()
        else item
        for slot, item in state.items()
    }


class CpuBucket:
    """Copies of one group and dtype whose gradients arrive with one event, and their optimizer."""

    def __init__(self, copies: Sequence[SteppedCopy], optimizer: torch.optim.Optimizer) -> None:
        self._copies = copies
        self._optimizer = optimizer
        (self.group,) = optimizer.param_groups
        self._may_fuse = type(optimizer) in _FUSED and copies[0].tensor.is_floating_point()
        self._transfers = copies[0].transfers
        self._arrived = self._transfers.event()
        self._sent = self._transfers.event()
        for stepped in copies:
            stepped.optimizer, stepped.sent = optimizer, self._sent

    def fetch(self, gradients: Mapping[SteppedCopy, torch.Tensor]) -> list[SteppedCopy]:
        """Starts the copies of this bucket's gradients to the host. See "Down waits for main".

        Returns:
            The copies that have a gradient.
        """
        found = [stepped for stepped in self._copies if stepped in gradients]
        if found:
            sources = [gradients[stepped] for stepped in found]
            if any(source.layout != torch.strided for source in sources):
                raise ValueError("a sparse gradient cannot be stepped on the CPU side: use cpu_fraction=0")
            self._transfers.down([stepped.host_gradient() for stepped in found], sources, self._arrived)
        return found

    def await_gradients(self) -> None:
        """Waits until the copies can be stepped. See the notes on the waits of the host."""
        self._arrived.synchronize()
        self._sent.synchronize()

    def step(self, copies: Sequence[SteppedCopy], states: Sequence[_Slots]) -> None:
        """Steps copies whose gradients have arrived.

        Tensors with different slots need separate calls: fused SGD reads the momentum of all tensors of a
        call, or of none.
        """
        by_layout: dict[Layout, list[SteppedCopy]] = {}
        for stepped, state in zip(copies, states, strict=True):
            by_layout.setdefault(_layout(state, stepped.tensor.dtype), []).append(stepped)
        for (is_plain, _), chosen in by_layout.items():
            try:
                for stepped in chosen:
                    stepped.tensor.grad = stepped.host_gradient()
                self._call(is_plain)
            finally:
                for stepped in chosen:
                    stepped.tensor.grad = None

    def send(self, copies: Sequence[SteppedCopy]) -> None:
        """Starts the copies to the parameters. See "Up waits for main"."""
        locals_ = [local_tensor(stepped.parameter) for stepped in copies]
        values = [stepped.outgoing(local) for stepped, local in zip(copies, locals_, strict=True)]
        self._transfers.up(locals_, values, self._sent)

    def _call(self, is_plain: bool) -> None:
        """Calls the optimizer, fused unless the program chose an implementation."""
        group = self.group
        chosen = group.get("fused"), group.get("foreach"), group.get("differentiable") or None
        if not (is_plain and self._may_fuse and chosen == (None, None, None)):
            self._optimizer.step()
            return
        group["fused"] = True
        try:
            self._optimizer.step()
        finally:
            group["fused"] = None


def _layout(state: _Slots, dtype: torch.dtype) -> Layout:
    """Whether a fused step can read the slots, and the names of those that are tensors."""
    names, is_plain = [], True
    for slot, item in state.items() if state else ():
        if isinstance(item, torch.Tensor):
            names.append(slot)
            if item.dtype is not dtype or not item.is_contiguous():
                is_plain = is_plain and not item.dim() and item.dtype in _COUNTS
    return is_plain, tuple(names)


def cut(copies: Sequence[SteppedCopy]) -> list[list[SteppedCopy]]:
    """Cuts copies of one group into the contents of buckets, in order."""
    full: list[list[SteppedCopy]] = []
    open_ones: dict[Any, tuple[list[SteppedCopy], int]] = {}
    for stepped in copies:
        key = (stepped.transfers, stepped.tensor.dtype)
        content, size = open_ones.get(key, ([], _BUCKET_BYTES + 1))
        size += stepped.tensor.nbytes
        if size > _BUCKET_BYTES:
            content, size = [], stepped.tensor.nbytes
            full.append(content)
        content.append(stepped)
        open_ones[key] = content, size
    return full
