"""The handler of tensors whose local parts the program describes."""

from __future__ import annotations

from shardproof.state.binder import Binder
from shardproof.state.collector import Collector
from shardproof.state.local_shards import FlatShard, LocalShards, described
from shardproof.state.visitor import Place

__all__ = ["EXPLICIT"]


class _Explicit:
    """Collects and binds `LocalShards` and `FlatShard`."""

    def collect(self, place: Place, value: LocalShards | FlatShard, collector: Collector) -> None:
        """Adds the described pieces."""
        collector.pieces(place.key, *described(value, place.key), origin=place.path)

    def bind(self, place: Place, value: LocalShards | FlatShard, binder: Binder) -> None:
        """Adds the described pieces as destinations."""
        binder.pieces(place.key, *described(value, place.key))


EXPLICIT = _Explicit()
