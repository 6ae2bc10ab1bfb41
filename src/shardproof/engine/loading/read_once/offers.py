"""The shared memory that the ranks of a node offer each other, in the first meeting of a load.

So they can open each other's memory before the exchange is planned, without another meeting.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardproof.engine.loading.read_once.node_memory import Handle
from shardproof.engine.loading.read_once.node_transfer import MOST_RANKS


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Shared memory that a rank offers."""

    node: str
    """Host name."""
    handle: Handle


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
