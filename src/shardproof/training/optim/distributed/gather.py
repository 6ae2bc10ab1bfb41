"""Gathers the stepped parameters on all ranks, while the next forward pass runs.

Note: no parameter is used during its gather
    A module's forward waits for the buckets of its own parameters. So do its `state_dict`, and its
    `load_state_dict`, whose values the gather would overwrite. Some parameters are used without a call of
    their module, for example when a head multiplies by the weight of an embedding. Their gradient hook finds
    that no module that holds them was called. From then on, their buckets are gathered before the step
    returns. The optimizer's own reads and writes begin with `wait_all`.

Note: compiled modules
    A hook runs before the compiled code of its module, and waits for the module's parameters and for those of
    all modules inside, whose hooks would break the graph. Those hooks become the check of an attribute. The
    compiled code has a guard on the attribute, so it is recompiled with the wait if the attribute is false: a
    module inside may also be called alone, or from other compiled code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from shardproof.training.optim.distributed.flat_bucket import FlatBucket, Owner, Weight

_GATHERED = "_shardproof_gathered"
"""Attribute of a module inside of a compiled one: True from the compiled module's wait to the next step."""


class Gather:
    """Starts gathers, and waits for each before its parameters are used.

    Args:
        buckets: buckets in the order in which backward fills them, roughly the reverse of forward's.
        overlap: if true, `start` returns before the gathers are complete.
    """

    def __init__(self, buckets: Sequence[FlatBucket], *, overlap: bool) -> None:
        self.buckets, self.overlap = buckets, overlap
        self._owners: dict[torch.nn.Module, Owner] = {}
        self._busy = False

    def attach_hooks(
        self, module: torch.nn.Module, weights: Iterable[Weight], on_forward: Callable[[], None]
    ) -> None:
        """Makes modules wait for their parameters, while this object lives."""
        self._on_forward = on_forward
        by_parameter = {weight.parameter: weight for weight in weights}
        for part in module.modules():
            direct = [by_parameter[item] for item in part.parameters(recurse=False) if item in by_parameter]
            if any(item in by_parameter for item in part.parameters()):
                self._owners[part] = Owner(list(dict.fromkeys(weight.bucket for weight in direct)))
                self._attach(part)
            for weight in direct:
                weight.owners.append(self._owners[part])

    def _attach(self, part: torch.nn.Module) -> None:
        alive = weakref.ref(self)

        @_disable_dynamo
        def before_forward(part: torch.nn.Module, _: Any) -> None:
            gather = alive()
            if gather is not None and part in gather._owners:  # a copy of the module has its own parameters
                gather._enter(part)

        def before_inner_forward(part: torch.nn.Module, _: Any) -> None:
            if not part._shardproof_gathered:
                before_forward(part, _)

        def before_use(*_: Any) -> None:
            gather = alive()
            if gather is not None:
                gather._wait_for(gather._owners[part])

        owner = self._owners[part]
        owner.hook = part.register_forward_pre_hook(before_forward, prepend=True)
        owner.inner_hook = before_inner_forward
        part.register_state_dict_pre_hook(before_use)  # type: ignore[no-untyped-call]
        part.register_load_state_dict_pre_hook(before_use)  # type: ignore[no-untyped-call]

    def _enter(self, part: torch.nn.Module) -> None:
        """Waits for the parameters of a module whose forward begins. See "compiled modules"."""
        self._on_forward()
        entered = [self._owners[part]]
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            inside = [one for one in part.modules() if one is not part and one in self._owners]
            for one in inside:
                owner = self._owners[one]
                if owner.hook is not None:
                    owner.hook.remove()
                    owner.hook = None
                    one.register_forward_pre_hook(owner.inner_hook, prepend=True)
                setattr(one, _GATHERED, True)
                entered.append(owner)
        for owner in entered:
            owner.called = True
            self._wait_for(owner)

    def _wait_for(self, owner: Owner) -> None:
        for bucket in owner.buckets if self._busy else ():
            self.wait(bucket)

    def start(self, changed: Iterable[FlatBucket]) -> None:
        """Gathers `changed` (equal on all ranks), the buckets that forward needs first in front."""
        chosen = set(changed)
        for part, owner in self._owners.items():
            owner.called = False
            if owner.hook is None:
                setattr(part, _GATHERED, False)
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
