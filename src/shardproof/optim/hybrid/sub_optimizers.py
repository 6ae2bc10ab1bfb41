"""The optimizers of the two sides, and how they share the program's groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardproof.optim.hybrid.groups import GroupLink
from shardproof.optim.hybrid.rules import Rules
from shardproof.optim.hybrid.twin import Twin
from shardproof.state.slots import options_of

__all__ = ["SubOptimizers"]


class SubOptimizers:
    """One optimizer for the device's part and one for each parameter of the CPU's.

    The device's has a group for each of the program's. Those of the CPU are stepped one by one, each as soon
    as its gradient is there.

    Args:
        rules: make the optimizers.
    """

    def __init__(self, rules: Rules) -> None:
        self.on_device: torch.optim.Optimizer | None = None
        """None until there is a group."""
        self._rules = rules
        self._links: list[list[GroupLink]] = []
        """By group of the program; the first link of each is listened to."""

    def adopt(self, group: dict[str, Any], twins: Sequence[Twin]) -> None:
        """Take the twins of a group of the program.

        The device's optimizer is the only one that lasts if another refuses the group, so it comes last.
        """
        links: list[GroupLink] = []
        for twin in twins:
            if twin.on_cpu:
                without = self._rules.not_of_cpu
                twin.optimizer = self._rules.on_cpu([{**options_of(group, without), "params": [twin.tensor]}])
                (cpu_group,) = twin.optimizer.param_groups
                links.append(GroupLink(group, cpu_group, on_cpu=True, without=without))
        inner = {**options_of(group), "params": [twin.tensor for twin in twins if not twin.on_cpu]}
        if self.on_device is None:
            self.on_device = self._rules.on_device([inner])
        else:
            self.on_device.add_param_group(inner)
        link = GroupLink(group, self.on_device.param_groups[-1], on_cpu=False, without=())
        if all(twin.on_cpu for twin in twins):
            links.append(link)  # the device has nothing to say
        else:
            links.insert(0, link)
        for twin in twins:
            twin.group = group
            if not twin.on_cpu:
                twin.optimizer = self.on_device
        self._links.append(links)

    @staticmethod
    def hand_over(state: Mapping[torch.Tensor, Any], twins: Mapping[torch.Tensor, Twin]) -> None:
        """What is in the program's `state` is what is stepped with, whoever put it there."""
        for parameter, twin in twins.items():
            if parameter in state:
                twin.optimizer.state[twin.tensor] = state[parameter]
            else:
                twin.optimizer.state.pop(twin.tensor, None)

    @staticmethod
    def take_back(state: dict[torch.Tensor, Any], twins: Mapping[torch.Tensor, Twin]) -> None:
        """What the steps have made is in the program's `state`."""
        for parameter, twin in twins.items():
            if twin.tensor in twin.optimizer.state:
                state[parameter] = twin.optimizer.state[twin.tensor]

    def tell(self) -> None:
        """Let all know what the program has changed in its groups."""
        for links in self._links:
            for link in links:
                link.tell()

    def hear(self) -> None:
        """Let the program's groups show what the steps have changed."""
        for links in self._links:
            links[0].hear()
