"""The plans of saves and loads: which rank writes which chunk where, and which chunks a rank reads.

The functions here see keys, shapes and boxes only. They touch no tensor data and do not communicate.

A save, on the coordinator: `Structure` of each rank, then `plan_writes` (merge, prove, writers, replicas). A
load, on each rank: `ChunkTable` from the index, then `plan_reads`.
"""

from shardproof.planning.chunk_table import ChunkTable, chunk_table
from shardproof.planning.read_plan import (
    OWN_ADVICE,
    ReadPlan,
    RequestedBoxes,
    plan_reads,
    prove_chunks,
)
from shardproof.planning.replicas import SAMPLE_BYTES, Replicas, SharedPieces, Slices
from shardproof.planning.structure import Structure, TensorTable
from shardproof.planning.write_plan import (
    CHUNK_BYTES,
    LARGE_BYTES,
    RankPlan,
    WritePlan,
    plan_writes,
    tensor_order,
)

__all__ = [
    "CHUNK_BYTES",
    "LARGE_BYTES",
    "OWN_ADVICE",
    "SAMPLE_BYTES",
    "ChunkTable",
    "RankPlan",
    "ReadPlan",
    "Replicas",
    "RequestedBoxes",
    "SharedPieces",
    "Slices",
    "Structure",
    "TensorTable",
    "WritePlan",
    "chunk_table",
    "plan_reads",
    "plan_writes",
    "prove_chunks",
    "tensor_order",
]
