"""Flat buffers: where each parameter lies in them, and the range that each rank owns.

`pack` is arithmetic alone, with the same result on every rank. Parameters follow each other in a bucket.
A bucket is cut into as many equal ranges as there are ranks, across parameters and rows (ZeRO, Rajbhandari
et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from shardproof.collectives import Work
from shardproof.optim.distributed.process_group import RankGroup
from shardproof.state import declare_storage_owner, local_tensor

__all__ = ["Bucket", "FlatBucket", "Owner", "Span", "Weight", "pack"]


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [offset, offset + size) of a bucket: one parameter, in row-major order."""

    parameter: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Bucket:
    """Spans in rising order, with padding between and behind, cut into one range for each rank.

    >>> (bucket,) = pack([(0, 5), (1, 6)], limit=100, ranks=3, align=2)
    >>> bucket.size, bucket.shard, bucket.spans[1]
    (12, 4, Span(parameter=1, offset=6, size=6))
    >>> [bucket.part(bucket.spans[1], rank) for rank in range(3)]
    [(0, 0), (0, 2), (2, 6)]
    """

    spans: tuple[Span, ...]
    size: int
    """Elements, padding included: a multiple of the number of ranks."""
    ranks: int

    @property
    def shard(self) -> int:
        """Elements of one rank's range."""
        return self.size // self.ranks

    def part(self, span: Span, rank: int) -> tuple[int, int]:
        """The range [start, stop) of a parameter's elements that a rank owns; (0, 0) where it owns none."""
        start = max(span.offset, rank * self.shard) - span.offset
        stop = min(span.stop, (rank + 1) * self.shard) - span.offset
        return (start, stop) if start < stop else (0, 0)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges [start, stop) that belong to no parameter."""
        at = 0
        for span in self.spans:
            if at < span.offset:
                yield at, span.offset
            at = span.stop
        if at < self.size:
            yield at, self.size


def pack(sizes: Iterable[tuple[int, int]], *, limit: int, ranks: int, align: int) -> list[Bucket]:
    """Parameters in buckets, in the order given.

    Args:
        sizes: parameter and its number of elements.
        limit: elements from which on a bucket takes no more; one larger parameter has a bucket to itself.
        ranks: ranges that each bucket is cut into.
        align: elements that every parameter and every range begin at a multiple of.
    """
    buckets: list[Bucket] = []
    spans: list[Span] = []
    end = 0

    def close() -> None:
        unit = ranks * align
        buckets.append(Bucket(tuple(spans), -(-end // unit) * unit, ranks))

    for parameter, size in sizes:
        start = -(-end // align) * align
        if spans and start + size > limit:
            close()
            spans, start = [], 0
        spans.append(Span(parameter, start, size))
        end = start + size
    if spans:
        close()
    return buckets


@dataclass(slots=True, eq=False)
class Owner:
    """A module that holds parameters of its own."""

    called: bool = False
    """Its forward has begun since the last step."""


@dataclass(slots=True, eq=False)
class Weight:
    """One parameter: where it lies, and the part of it that this rank steps."""

    name: str
    parameter: torch.nn.Parameter
    group: int
    """Its row in `param_groups`."""
    counted: bool
    """Its elements enter norms on this rank: they are not a tensor-parallel replica of another's."""
    siblings: Mapping[str, torch.nn.Parameter | None]
    """All parameters of the module that holds it, as they are now."""
    bucket: FlatBucket = field(init=False)
    data: torch.Tensor = field(init=False)
    """The local tensor: a view of the bucket's parameters."""
    offset: int = field(init=False)
    """In the bucket."""
    start: int = field(init=False)
    stop: int = field(init=False)
    """Elements [start, stop) of the local tensor are this rank's; equal where none are."""
    fragment: torch.Tensor = field(init=False)
    """1-D, `stop - start` elements, which the inner optimizer steps: masters, or a view of `data`."""
    mastered: bool = field(init=False)
    """`fragment` holds masters."""
    stepped_dtype: torch.dtype = field(init=False)
    """In which the inner optimizer sees it."""
    expected: bool = True
    """It had a gradient on some rank in the last step, so that its bucket waits for one in the next."""
    seen: bool = False
    """It has had a gradient on this rank since the last `zero_grad`."""
    written: bool = False
    """Its place in the full gradient buffer holds a gradient that has not been sent."""
    ready: bool = False
    """Its gradient is complete."""
    version: int = 0
    """Version of the parameter after the optimizer's own last change."""
    owners: list[Owner] = field(default_factory=list)

    def place(self, bucket: FlatBucket, offset: int, part: tuple[int, int]) -> None:
        """Move the parameter's values into the bucket."""
        local = local_tensor(self.parameter)
        self.bucket, self.offset, (self.start, self.stop) = bucket, offset, part
        view = bucket.parameters[offset : offset + local.numel()].view(local.shape).data
        view.copy_(local.detach())
        if local is self.parameter:
            self.parameter.data = view
        else:
            self.parameter._local_tensor = view  # type: ignore[attr-defined]
        self.data = view
        declare_storage_owner(self.parameter, bucket.parameters)

    @property
    def owned(self) -> torch.Tensor:
        """This rank's elements of the parameter: 1-D, shares memory."""
        return self.data.view(-1)[self.start : self.stop]

    @property
    def owned_gradient(self) -> torch.Tensor:
        """This rank's elements of the reduced gradient, not yet multiplied by the bucket's `scale`."""
        bucket = self.bucket
        at = self.offset + self.start - bucket.first if self.start < self.stop else 0
        return bucket.shard[at : at + self.stop - self.start]

    def current_version(self) -> int:
        """Changes when anybody writes to the parameter through torch, or a load fills it."""
        return int(self.parameter._version) + int(self.data._version)

    def check_in_place(self) -> None:
        """Raises where something else has given the parameter, or its module, other memory."""
        held = self.siblings.get(self.name.rpartition(".")[2])
        replaced = held is not None and held is not self.parameter
        moved = local_tensor(self.parameter).data_ptr() != self.data.data_ptr()
        if replaced or (moved and self.data.numel()):
            raise RuntimeError(
                f"{self.name} no longer lies in the optimizer's flat buffer: it was given other memory after "
                "the DistributedOptimizer was made (module.to(...), load_state_dict(assign=True), "
                "param.data = ...). Make the optimizer after such changes"
            )


class FlatBucket:
    """The flat buffers of one bucket, and how far the reduction of its gradients is.

    Args:
        geometry: where its parameters lie.
        ranks: among whom it is cut.
        weights: in the order of the geometry's spans.
        gradient_dtype: of the gradient buffers.
    """

    def __init__(
        self, geometry: Bucket, ranks: RankGroup, weights: list[Weight], gradient_dtype: torch.dtype
    ) -> None:
        like = local_tensor(weights[0].parameter)
        self.geometry, self.ranks, self.weights = geometry, ranks, weights
        self.device, self.gradient_dtype = like.device, gradient_dtype
        self.first = ranks.rank * geometry.shard
        """Where this rank's range begins."""
        self.parameters = torch.zeros(geometry.size, dtype=like.dtype, device=like.device)
        for weight, span in zip(weights, geometry.spans, strict=True):
            weight.place(self, span.offset, geometry.part(span, ranks.rank))
        self.shard = torch.zeros(geometry.shard, dtype=gradient_dtype, device=like.device)
        """This rank's range of the reduced gradients."""
        self.scale = 1.0
        """What `shard` is still to be multiplied by."""
        self.full: torch.Tensor | None = None
        """The whole bucket's gradients, while there are any to be sent."""
        self.launched = False
        """Its reduction has begun since the last `zero_grad`."""
        self.landed = False
        """`shard` holds gradients."""
        self.flight: tuple[Work | None, torch.Tensor, torch.Tensor] | None = None
        """A reduction under way: its work, what it reads, what it fills."""
        self.gathering: Work | None = None
        """A gather of the parameters under way."""
        self.eager = False
        """A parameter is used outside of its module's forward: gather before the step returns."""
        self.exact = not any(not weight.counted for weight in weights)
        """All that `shard` holds is counted in norms."""

    @property
    def owned(self) -> torch.Tensor:
        """This rank's range of the parameters: shares memory."""
        return self.parameters[self.first : self.first + self.geometry.shard]

    def multiply(self, factor: float) -> None:
        """The reduced gradients times a factor. Narrow ones take it when they are raised for the step."""
        scale = self.scale * factor
        if self.shard.dtype.itemsize >= 4 or scale == 0.0 or scale - scale != 0.0:
            if factor != 1.0:
                self.shard.mul_(factor)
        else:
            self.scale = scale

    def counted(self) -> list[torch.Tensor]:
        """The reduced gradients whose elements this rank counts, not yet multiplied by `scale`."""
        if self.exact:
            return [self.shard]
        return [weight.owned_gradient for weight in self.weights if weight.counted]
