"""The plans of saves and loads: which rank writes which chunk where, and which chunks a rank reads.

The functions here work on keys, shapes and boxes only. They access no tensor data and do not communicate.

In a save, the coordinator calls `plan_writes` on the `Structure` of each rank (merge, prove, writers,
replicas). In a load, each rank calls `plan_reads` on the `ChunkTable` of the index.
"""

from shardproof.engine.planning.key_selection import (
    Cast,
    Patterns,
    casts,
    check_patterns,
    no_match,
    rename_keys,
    selects,
    stored_name,
    unused_patterns,
    unused_renames,
)
from shardproof.engine.planning.merge import remedy_of_difference
from shardproof.engine.planning.read_plan import (
    OWN_ADVICE,
    ChunkTable,
    ReadPlan,
    RequestedBoxes,
    chunk_table,
    plan_reads,
    prove_chunks,
)
from shardproof.engine.planning.replicas import SAMPLE_BYTES, Replicas, SharedPieces, Slices
from shardproof.engine.planning.structure import Structure, TensorTable
from shardproof.engine.planning.write_plan import (
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
    "Cast",
    "ChunkTable",
    "Patterns",
    "RankPlan",
    "ReadPlan",
    "Replicas",
    "RequestedBoxes",
    "SharedPieces",
    "Slices",
    "Structure",
    "TensorTable",
    "WritePlan",
    "casts",
    "check_patterns",
    "chunk_table",
    "no_match",
    "plan_reads",
    "plan_writes",
    "prove_chunks",
    "remedy_of_difference",
    "rename_keys",
    "selects",
    "stored_name",
    "tensor_order",
    "unused_patterns",
    "unused_renames",
]
