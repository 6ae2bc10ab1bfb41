"""Fragments that the inner optimizer steps: views of parameters, or their masters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardproof.optim.distributed.flat_bucket import FlatBucket
from shardproof.optim.parameter_values import refreshed
from shardproof.state import declare_storage_owner

__all__ = ["Masters"]


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
            mastered = dtype is not None and narrow.itemsize < 4 and narrow != dtype
            if mastered:
                self._masters[bucket] = bucket.owned.to(dtype)
            for weight in bucket.weights:
                weight.mastered = mastered
                if mastered:
                    at = weight.offset + weight.start - bucket.first if weight.start < weight.stop else 0
                    weight.fragment = self._masters[bucket][at : at + weight.stop - weight.start]
                else:
                    weight.fragment = weight.owned
                declare_storage_owner(
                    weight.fragment, self._masters[bucket] if mastered else bucket.parameters
                )

    def follow_parameters(self) -> None:
        """Refreshes the masters of parameters that the program has written to.

        A fragment without a master shares the parameter's memory but not its version counter. The version of
        the fragment is incremented, so that an inner optimizer with its own copies sees the write.
        """
        for weight in self._weights:
            if weight.current_version() == weight.version:
                continue
            if not weight.mastered:
                torch.autograd.graph.increment_version(weight.fragment)
            else:
                weight.fragment.copy_(refreshed(weight.fragment, weight.owned))
            weight.version = weight.current_version()

    def round_to_parameters(self, changed: Iterable[FlatBucket]) -> None:
        """Rounds the masters into this rank's range of each changed bucket."""
        for bucket in changed:
            if bucket in self._masters:
                bucket.owned.copy_(self._masters[bucket])

    def record_versions(self) -> None:
        """Records the current version of every parameter."""
        for weight in self._weights:
            weight.version = weight.current_version()
