"""The first meeting of a load: each rank reports its matches, and shared memory for its node.

The handles of the shared memory are part of the first report. So the ranks of a node can open each other's
memory before the exchange is planned, without another meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from shardproof.loading.matching import MatchReport, agree
from shardproof.loading.read_once.node_memory import Handle
from shardproof.loading.read_once.node_transfer import MOST_RANKS

__all__ = ["Answer", "Offer", "answer", "post", "usable_handles"]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Shared memory that a rank offers."""

    node: str
    """Host name."""
    handle: Handle


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the coordinator."""

    missing: tuple[str, ...]
    """Keys of the target that the checkpoint does not have."""
    unexpected: tuple[str, ...]
    """Keys of the checkpoint that no rank asked for."""
    dropped: tuple[str, ...]
    """Per-rank values of the checkpoint that no rank takes."""
    only_adapted: tuple[str, ...]
    """Keys of the checkpoint that load hooks of some ranks get, and that belong to no rank's target."""
    handles: tuple[Handle, ...]
    """See `usable_handles`."""


class _OfferPost(msgspec.Struct, frozen=True, array_like=True):
    match: MatchReport
    offer: Offer | None


def post(match: MatchReport, offer: Offer | None = None) -> bytes:
    """The report of a rank, as bytes."""
    return msgspec.msgpack.encode(_OfferPost(match, offer))


def answer(location: str, posts: Sequence[bytes], stored: Callable[[], Iterable[str]]) -> bytes:
    """Coordinator: an `Answer`, as bytes; `stored` as for `agree`.

    Raises:
        ShardproofError: the ranks do not agree (see `agree`).
    """
    reports = [msgspec.msgpack.decode(one, type=_OfferPost) for one in posts]
    agreed = agree(location, [report.match for report in reports], stored)
    handles = usable_handles([report.offer for report in reports])
    return msgspec.msgpack.encode(Answer(*agreed, handles))


def usable_handles(offers: Sequence[Offer | None]) -> tuple[Handle, ...]:
    """The handles of all ranks, in the order of ranks.

    Empty if shared memory cannot serve the exchange: there are several nodes, too many ranks, or a rank
    without an offer.

    >>> one, other = (Offer(node, Handle(1, 2, 3, 4, b"")) for node in ("n0", "n1"))
    >>> [len(usable_handles(offers)) for offers in ([one, one], [one, other], [one, None])]
    [2, 0, 0]
    """
    offered = [offer for offer in offers if offer is not None]
    if len(offered) < len(offers) or len(offers) > MOST_RANKS or len({one.node for one in offered}) > 1:
        return ()
    return tuple(one.handle for one in offered)
