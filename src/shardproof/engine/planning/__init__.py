"""The plans of saves and loads: which rank writes which chunk where, and which chunks a rank reads.

The functions here work on keys, shapes and boxes only. They access no tensor data and do not communicate.

In a save, the coordinator calls `plan_writes` on the `Structure` of each rank (merge, prove, writers,
replicas). In a load, each rank calls `plan_reads` on the `ChunkTable` of the index.
"""

from __future__ import annotations

from shardproof.engine.planning.key_selection import Cast as Cast
from shardproof.engine.planning.key_selection import Patterns as Patterns
from shardproof.engine.planning.key_selection import casts as casts
from shardproof.engine.planning.key_selection import check_patterns as check_patterns
from shardproof.engine.planning.key_selection import no_match as no_match
from shardproof.engine.planning.key_selection import rename_keys as rename_keys
from shardproof.engine.planning.key_selection import selects as selects
from shardproof.engine.planning.key_selection import stored_name as stored_name
from shardproof.engine.planning.key_selection import unused_patterns as unused_patterns
from shardproof.engine.planning.key_selection import unused_renames as unused_renames
from shardproof.engine.planning.merge import remedy_of_difference as remedy_of_difference
from shardproof.engine.planning.read_plan import OWN_ADVICE as OWN_ADVICE
from shardproof.engine.planning.read_plan import ChunkTable as ChunkTable
from shardproof.engine.planning.read_plan import ReadPlan as ReadPlan
from shardproof.engine.planning.read_plan import RequestedBoxes as RequestedBoxes
from shardproof.engine.planning.read_plan import chunk_table as chunk_table
from shardproof.engine.planning.read_plan import plan_reads as plan_reads
from shardproof.engine.planning.read_plan import prove_chunks as prove_chunks
from shardproof.engine.planning.replicas import SAMPLE_BYTES as SAMPLE_BYTES
from shardproof.engine.planning.replicas import Slices as Slices
from shardproof.engine.planning.structure import Structure as Structure
from shardproof.engine.planning.structure import TensorTable as TensorTable
from shardproof.engine.planning.write_plan import CHUNK_BYTES as CHUNK_BYTES
from shardproof.engine.planning.write_plan import LARGE_BYTES as LARGE_BYTES
from shardproof.engine.planning.write_plan import RankPlan as RankPlan
from shardproof.engine.planning.write_plan import WritePlan as WritePlan
from shardproof.engine.planning.write_plan import plan_writes as plan_writes
from shardproof.engine.planning.write_plan import tensor_order as tensor_order
