"""The optimizers of CPU and device, and the options of the program's groups that they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shardproof.optim.hybrid.rules import Rules
from shardproof.optim.hybrid.stepped_copy import SteppedCopy
from shardproof.state import options_of

__all__ = ["GroupLink", "SubOptimizers"]


class GroupLink:
    """Keeps one group of a sub-optimizer at what the program's group says.

    Options that the optimizer's step itself changes (some keep a count or an estimate in the group) stay what
    the step made them, until the program sets another value.

    Args:
        group: the program's.
        inner: the sub-optimizer's, made from `group`.
        on_cpu: the inner group's side.
        without: options that this side does not have.
    """

    def __init__(
        self, group: dict[str, Any], inner: dict[str, Any], *, on_cpu: bool, without: Collection[str]
    ) -> None:
        self._group = group
        self._inner = inner
        self._on_cpu = on_cpu
        self._without = frozenset(without)
        self._told: dict[str, Any] = {}

    def push_options(self) -> None:
        """Hand over what the program (a scheduler) has changed since the last time."""
        for name, item in options_of(self._group, self._without).items():
            if name in self._told and _same(item, self._told[name]):
                continue
            if self._on_cpu and isinstance(item, torch.Tensor) and item.device.type != "cpu":
                raise ValueError(
                    f"the option {name} is a tensor on {item.device}, which the CPU side could only read by "
                    "waiting for the device: give a number, or a tensor on the CPU"
                )
            self._inner[name] = self._told[name] = item

    def pull_options(self) -> None:
        """Show the program what the step has changed."""
        for name, item in self._told.items():
            found = self._inner.get(name)
            if not _same(found, item):
                self._group[name] = self._told[name] = found


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same option; tensors, which change in place, are themselves alone."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(one == other)


class SubOptimizers:
    """One optimizer for the device's part and one for each parameter of the CPU's.

    The device's has a group for each of the program's. Those of the CPU are stepped one by one, each as soon
    as its gradient is there.

    Args:
        rules: make the optimizers.
        dtypes: what the program's `state` keeps slots in, where that is not the dtype that they are stepped
            in.
    """

    def __init__(self, rules: Rules, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self.on_device: torch.optim.Optimizer | None = None
        """None until there is a group."""
        self._rules = rules
        self._links: list[list[GroupLink]] = []
        """By group of the program; the first link of each is listened to."""

    def adopt(self, group: dict[str, Any], copies: Sequence[SteppedCopy]) -> None:
        """Take the copies of a group of the program.

        The device's optimizer is the only one that lasts if another refuses the group, so it comes last.
        """
        links: list[GroupLink] = []
        for stepped in copies:
            if stepped.on_cpu:
                without = self._rules.not_of_cpu
                stepped.optimizer = self._rules.on_cpu(
                    [{**options_of(group, without), "params": [stepped.tensor]}]
                )
                (cpu_group,) = stepped.optimizer.param_groups
                links.append(GroupLink(group, cpu_group, on_cpu=True, without=without))
        inner = {**options_of(group), "params": [stepped.tensor for stepped in copies if not stepped.on_cpu]}
        if self.on_device is None:
            self.on_device = self._rules.on_device([inner])
        else:
            self.on_device.add_param_group(inner)
        link = GroupLink(group, self.on_device.param_groups[-1], on_cpu=False, without=())
        if all(stepped.on_cpu for stepped in copies):
            links.append(link)  # the device has nothing to say
        else:
            links.insert(0, link)
        for stepped in copies:
            stepped.group = group
            if not stepped.on_cpu:
                stepped.optimizer = self.on_device
        self._links.append(links)

    def step(
        self, optimizer: torch.optim.Optimizer, copies: Sequence[SteppedCopy], state: dict[torch.Tensor, Any]
    ) -> None:
        """Step some of one optimizer's copies, those that have a gradient, with the program's `state`."""
        self._hand_over(state, copies)
        try:
            optimizer.step()
        finally:
            self._take_back(state, copies)

    def _hand_over(self, state: Mapping[torch.Tensor, Any], copies: Sequence[SteppedCopy]) -> None:
        """What is in the program's `state` is what is stepped with, whoever put it there."""
        for stepped in copies:
            if stepped.parameter in state:
                of_parameter = state[stepped.parameter]
                if self._dtypes:
                    of_parameter = {
                        slot: item.to(stepped.tensor.dtype)
                        if slot in self._dtypes and _elements(item)
                        else item
                        for slot, item in of_parameter.items()
                    }
                stepped.optimizer.state[stepped.tensor] = of_parameter
            else:
                stepped.optimizer.state.pop(stepped.tensor, None)

    def _take_back(self, state: dict[torch.Tensor, Any], copies: Sequence[SteppedCopy]) -> None:
        """What the steps have made is in the program's `state`; what was raised for them is let go."""
        for stepped in copies:
            if stepped.tensor not in stepped.optimizer.state:
                continue
            if not self._dtypes:
                state[stepped.parameter] = stepped.optimizer.state[stepped.tensor]
                continue
            state[stepped.parameter] = {
                slot: item.to(self._dtypes[slot]) if slot in self._dtypes and _elements(item) else item
                for slot, item in stepped.optimizer.state.pop(stepped.tensor).items()
            }

    def push_options(self) -> None:
        """Let all know what the program has changed in its groups."""
        for links in self._links:
            for link in links:
                link.push_options()

    def pull_options(self) -> None:
        """Let the program's groups show what the steps have changed."""
        for links in self._links:
            links[0].pull_options()


def _elements(item: Any) -> bool:
    """Whether it has an element for each of the parameter's, and is no count."""
    return isinstance(item, torch.Tensor) and item.dim() > 0
