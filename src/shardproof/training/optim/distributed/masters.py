"""Fragments that the inner optimizer steps: views of parameters, or their masters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardproof.engine.state import declare_storage_owner
from shardproof.training.optim.distributed.flat_bucket import FlatBucket
from shardproof.training.optim.parameter_values import refreshed


class Masters:
    """Makes the fragment of every weight.

    Args:
        buckets: buckets whose parameters are initialised.
        dtype: dtype of the masters of parameters that are narrower than fp32; None for no masters.
    """

    def __init__(self, buckets: Sequence[FlatBucket], dtype: torch.dtype | None) -> None:
        self._weights = [weight for bucket in buckets for weight in bucket.weights]
        self._masters: dict[FlatBucket, torch.Tensor] = {}
        for bucket in buckets:
            narrow = bucket.parameters.dtype
            if dtype is not None and narrow.itemsize < 4 and narrow != dtype:
                self._masters[bucket] = bucket.owned.to(dtype)
            master = self._masters.get(bucket)
            for weight in bucket.weights:
                weight.mastered = master is not None
                weight.fragment = weight.owned if master is None else weight.within(master)
                declare_storage_owner(weight.fragment, bucket.parameters if master is None else master)

    def follow_parameters(self) -> None:
        """Refreshes the masters of parameters that the program has written to.

        A fragment without a master shares the parameter's memory but not its version counter. The version of
        the fragment is incremented, so that an inner optimizer with its own copies sees the write.
        """
        for weight in self._weights:
            if weight.current_version() == weight.version:
                continue
            if weight.mastered:
                weight.fragment.copy_(refreshed(weight.fragment, weight.owned))
            else:
                torch.autograd.graph.increment_version(weight.fragment)
            weight.version = weight.current_version()

    def round_to_parameters(self, changed: Iterable[FlatBucket]) -> None:
        """Rounds the masters into this rank's range of each changed bucket."""
        for bucket in self._masters.keys() & set(changed):
            bucket.owned.copy_(self._masters[bucket])

    def record_versions(self) -> None:
        """Records the current version of every parameter."""
        for weight in self._weights:
            weight.version = weight.current_version()
