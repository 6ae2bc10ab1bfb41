"""Structure and its digest, who writes what and where, and what to read. No tensor data, no communication."""

from shardproof.planning.chunk_table import ChunkTable
from shardproof.planning.read_plan import ReadPlan, Wanted, plan_reads, prove_chunks
from shardproof.planning.replicas import SAMPLE_BYTES, Replicas, SharedPieces, Slices
from shardproof.planning.structure import Structure, TensorTable
from shardproof.planning.write_plan import (
    CHUNK_BYTES,
    LARGE_BYTES,
    RankPlan,
    WritePlan,
    places_in_files,
    plan_writes,
)

__all__ = [
    "CHUNK_BYTES",
    "LARGE_BYTES",
    "SAMPLE_BYTES",
    "ChunkTable",
    "RankPlan",
    "ReadPlan",
    "Replicas",
    "SharedPieces",
    "Slices",
    "Structure",
    "TensorTable",
    "Wanted",
    "WritePlan",
    "places_in_files",
    "plan_reads",
    "plan_writes",
    "prove_chunks",
]
