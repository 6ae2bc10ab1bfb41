"""Which parameters got a gradient on any rank, so that all ranks agree on which `.grad` is None."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardproof.collectives import all_reduce
from shardproof.fsdp.reduce import Reduction

__all__ = ["Agreement"]


class Agreement:
    """The flags of all parameters of reductions, sent in one tensor a mesh while the reductions run.

    A rank on which every parameter got a gradient knows the answer without reading it, so on an accelerator
    its host waits for nothing.
    """

    def __init__(self, reductions: list[Reduction]) -> None:
        by_mesh: dict[tuple[int, ...], list[Reduction]] = {}
        for reduction in reductions:
            by_mesh.setdefault(tuple(map(id, reduction.buffer.ranks.groups)), []).append(reduction)
        self._flags: dict[Reduction, tuple[torch.Tensor, int]] = {}
        self._works: list[Any] = []
        for alike in by_mesh.values():
            bits: list[bool] = []
            places = []
            for reduction in alike:
                places.append(len(bits))
                arrived = reduction.arrived
                bits += [
                    p.member in arrived or not p.sharded.requires_grad for p in reduction.buffer.parameters
                ]
            flags = torch.ones(len(bits), dtype=torch.int32, device=alike[0].buffer.device)
            if not all(bits):
                flags.copy_(torch.tensor(bits, dtype=torch.bool, device="cpu"))
            for reduction, place in zip(alike, places, strict=True):
                self._flags[reduction] = (flags, place)
            groups = [group for group in alike[0].buffer.ranks.groups if group.size() > 1]
            for group in groups:
                self._works.append(all_reduce(flags, group, dist.ReduceOp.MAX))
                if group is not groups[-1]:
                    self._works.pop().wait()

    def wait(self) -> None:
        """Ends the collectives."""
        for work in self._works:
            work.wait()
        self._works = []

    def arrived(self, reduction: Reduction) -> frozenset[int]:
        """Members of the buffer's packing that got a gradient on any rank, or are frozen. After `wait`."""
        parameters = reduction.buffer.parameters
        if all(p.member in reduction.arrived for p in parameters if p.sharded.requires_grad):
            return reduction.arrived
        flags, place = self._flags[reduction]
        found = flags[place : place + len(parameters)].tolist()
        return frozenset(p.member for p, flag in zip(parameters, found, strict=True) if flag)
