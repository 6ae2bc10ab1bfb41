"""Live objects to sharded tensors and plain data, and back, on one rank and without communication."""

from __future__ import annotations

from shardproof.state.decoding import decode as decode_plain
from shardproof.state.entries import (
    Binding,
    Catalogue,
    Collected,
    Mismatch,
    ObjectEntry,
    Piece,
    TensorEntry,
)
from shardproof.state.explicit import FlatShard, ShardedTensor
from shardproof.state.generators import RandomState
from shardproof.state.optimizers import OptimizerState
from shardproof.state.per_rank import PerRank
from shardproof.state.plain import encode as encode_plain
from shardproof.state.registered import register_dataclass, register_enum
from shardproof.state.tensors import is_plain_memory
from shardproof.state.tree import bind, collect

__all__ = [
    "Binding",
    "Catalogue",
    "Collected",
    "FlatShard",
    "Mismatch",
    "ObjectEntry",
    "OptimizerState",
    "PerRank",
    "Piece",
    "RandomState",
    "ShardedTensor",
    "TensorEntry",
    "bind",
    "collect",
    "decode_plain",
    "encode_plain",
    "is_plain_memory",
    "register_dataclass",
    "register_enum",
]
