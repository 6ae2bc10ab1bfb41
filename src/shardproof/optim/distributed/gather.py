"""The stepped parameters to all ranks, while the next forward pass is already under way.

Note: nobody uses a parameter that is being gathered
    A module's forward waits for the buckets of its own parameters, and so do its `state_dict` and
    `load_state_dict`, whose values the gather would write over. Parameters that are seen to be used
    otherwise (a head that multiplies by the weight of an embedding which is not called) are gathered before
    the step returns: their gradient hook finds that no module that holds them has been called. The
    optimizer's own reads and writes begin with `wait_all`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardproof.optim.distributed.flat_bucket import FlatBucket, Owner, Weight

__all__ = ["Gather"]


class Gather:
    """Begins gathers, and waits for them where they are needed.

    Args:
        buckets: in the order in which backward fills them, which is about the reverse of forward's.
        overlap: return while they are under way.
    """

    def __init__(self, buckets: Sequence[FlatBucket], *, overlap: bool) -> None:
        self.buckets, self.overlap = buckets, overlap
        self._owners: list[Owner] = []
        self._busy = False

    def attach_hooks(self, module: torch.nn.Module, weights: Iterable[Weight]) -> None:
        """Have modules wait for their parameters. Ends with the life of this object."""
        by_parameter = {weight.parameter: weight for weight in weights}
        for part in module.modules():
            held = [by_parameter[item] for item in part.parameters(recurse=False) if item in by_parameter]
            if held:
                owner = Owner()
                self._owners.append(owner)
                for weight in held:
                    weight.owners.append(owner)
                self._attach(part, owner, list(dict.fromkeys(weight.bucket for weight in held)))

    def _attach(self, part: torch.nn.Module, owner: Owner, buckets: list[FlatBucket]) -> None:
        alive = weakref.ref(self)

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
        """Gather those buckets, which are the same on all ranks; the parameters needed first go first."""
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
        """Until the bucket's parameters may be read."""
        if bucket.gathering is not None:
            bucket.gathering.wait()
            bucket.gathering = None

    def wait_all(self) -> None:
        """Until all parameters may be read and written."""
        for bucket in self.buckets:
            self.wait(bucket)
        self._busy = False
