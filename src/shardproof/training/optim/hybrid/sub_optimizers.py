"""The sub-optimizers of both sides, which share the options of the program's groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardproof.engine.state import options_of
from shardproof.training.optim.hybrid.cpu_bucket import CpuBucket, cut
from shardproof.training.optim.hybrid.sides import Rules
from shardproof.training.optim.hybrid.stepped_copy import SteppedCopy


class GroupLink:
    """Synchronises one group of a sub-optimizer with the program's group.

    Some optimizers change an option in `step`, for example a count or an estimate. Such an option keeps the
    optimizer's value until the program sets another.

    Args:
        group: the program's group.
        inner: the sub-optimizer's group, made from `group`.
        on_cpu: True if the inner group is on the CPU side.
        without: options that this side does not accept.
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
