"""Gathers the stepped parameters on all ranks, while the next forward pass runs.

Note: no parameter is used during its gather
    A module's forward waits for the buckets of its own parameters. So do its `state_dict`, and its
    `load_state_dict`, whose values the gather would overwrite. Some parameters are used without a call of
    their module, for example when a head multiplies by the weight of an embedding. Their gradient hook finds
    that no module that holds them was called. From then on, their buckets are gathered before the step
    returns. The optimizer's own reads and writes begin with `wait_all`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from shardproof.optim.distributed.flat_bucket import FlatBucket, Owner, Weight

__all__ = ["Gather"]


class Gather:
    """Starts gathers, and waits for each before its parameters are used.

    Args:
        buckets: buckets in the order in which backward fills them, roughly the reverse of forward's.
        overlap: if true, `start` returns before the gathers are complete.
    """

    def __init__(self, buckets: Sequence[FlatBucket], *, overlap: bool) -> None:
        self.buckets, self.overlap = buckets, overlap
        self._owners: list[Owner] = []
        self._busy = False

    def attach_hooks(self, module: torch.nn.Module, weights: Iterable[Weight]) -> None:
        """Makes modules wait for their parameters, while this object lives."""
        by_parameter = {weight.parameter: weight for weight in weights}
        for part in module.modules():
            direct = [by_parameter[item] for item in part.parameters(recurse=False) if item in by_parameter]
            if direct:
                owner = Owner()
                self._owners.append(owner)
                for weight in direct:
                    weight.owners.append(owner)
                self._attach(part, owner, list(dict.fromkeys(weight.bucket for weight in direct)))

    def _attach(self, part: torch.nn.Module, owner: Owner, buckets: list[FlatBucket]) -> None:
        alive = weakref.ref(self)

        @_disable_dynamo  # a compiled module runs the hook before its compiled code
        def before_forward(_: torch.nn.Module, __: Any) -> None:
            owner.called = True
            before_use()

        def before_use(*_: Any) -> None:
            gather = alive()
            if gather is not None and gather._busy:
                for bucket in buckets:
                    gather.wait(bucket)

        part.register_forward_pre_hook(before_forward, prepend=True)
        part.register_state_dict_pre_hook(before_use)  # type: ignore[no-untyped-call]
        part.register_load_state_dict_pre_hook(before_use)  # type: ignore[no-untyped-call]

    def start(self, changed: Iterable[FlatBucket]) -> None:
        """Gathers `changed` (equal on all ranks), the buckets that forward needs first in front."""
        chosen = set(changed)
        for owner in self._owners:
            owner.called = False
        for bucket in reversed(self.buckets):
            if bucket in chosen:
                bucket.gathering = bucket.ranks.gather(bucket.parameters, bucket.owned)
        self._busy = True
        for bucket in self.buckets:
            if bucket.eager or not self.overlap:
                self.wait(bucket)

    def wait(self, bucket: FlatBucket) -> None:
        """Blocks until the parameters of the bucket may be read."""
        if bucket.gathering is not None:
            bucket.gathering.wait()
            bucket.gathering = None

    def wait_all(self) -> None:
        """Blocks until all parameters may be read and written."""
        for bucket in self.buckets:
            self.wait(bucket)
        self._busy = False
