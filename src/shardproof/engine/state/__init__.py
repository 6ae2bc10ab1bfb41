"""Converts live objects to sharded tensors and plain data, and back, on one rank without communication."""

from __future__ import annotations

from shardproof.engine.state.collector import hoisted_key as hoisted_key  # not listed in __all__: internal
from shardproof.engine.state.collector import hoisted_tensor
from shardproof.engine.state.dtensor import LOCAL, dtensor_index_map, is_dtensor, is_sharded, local_tensor
from shardproof.engine.state.dtensor import index_map_of as index_map_of  # not listed in __all__: internal
from shardproof.engine.state.dtensor import (
    local_segments as local_segments,  # not listed in __all__: internal
)
from shardproof.engine.state.dtensor import sizes_of as sizes_of  # not listed in __all__: internal
from shardproof.engine.state.fence import Fence, open_all
from shardproof.engine.state.flat_parameters import (
    flat_tensors as flat_tensors,  # not listed in __all__: internal
)
from shardproof.engine.state.framework_modules import (
    refuse_collective as refuse_collective,  # not listed in __all__: internal
)
from shardproof.engine.state.framework_modules import (
    without_fabric as without_fabric,
)  # not listed in __all__: internal
from shardproof.engine.state.handlers.per_rank import PerRank, RandomState, owner_of
from shardproof.engine.state.handlers.stateful_objects import parts_of
from shardproof.engine.state.handlers.stateful_objects import (
    refuse_divided as refuse_divided,  # not listed in __all__: internal
)
from shardproof.engine.state.last_walk import LastWalk
from shardproof.engine.state.layout import LAYOUTS, Layout, declare, local_layout
from shardproof.engine.state.layout import declared as declared  # not listed in __all__: internal
from shardproof.engine.state.local_shards import FlatShard, LocalShards
from shardproof.engine.state.model_parts import (
    model_parallel as model_parallel,  # not listed in __all__: internal
)
from shardproof.engine.state.model_parts import (
    refuse_loose_parts as refuse_loose_parts,  # not listed in __all__: internal
)
from shardproof.engine.state.module_names import (
    NamedModule as NamedModule,  # not listed in __all__: internal
)
from shardproof.engine.state.module_names import inside, number_expert, rename, share
from shardproof.engine.state.optimizer.collect import OptimizerState
from shardproof.engine.state.optimizer.slot_sources import HybridDeviceSlots as HybridDeviceSlots  # internal
from shardproof.engine.state.optimizer.slot_sources import is_hybrid_device as is_hybrid_device  # internal
from shardproof.engine.state.optimizer.slot_sources import receiver, slots_of
from shardproof.engine.state.optimizer.slots import (
    EXECUTION_OPTIONS as EXECUTION_OPTIONS,  # not listed: internal
)
from shardproof.engine.state.optimizer.slots import (
    MASTER,
    LocalRange,
    ParameterSlots,
    Receipt,
    SlotProvider,
    StoredSlot,
    options_of,
)
from shardproof.engine.state.optimizer.slots import (
    device_of_scalar as device_of_scalar,  # not listed: internal
)
from shardproof.engine.state.optimizer.slots import (
    tensors_and_values as tensors_and_values,  # not listed: internal
)
from shardproof.engine.state.optimizer.state_dict_keys import optimizer_state_dicts, with_new_key
from shardproof.engine.state.plain_decode import decode as decode_plain
from shardproof.engine.state.plain_decode import references
from shardproof.engine.state.plain_encode import canonical_json
from shardproof.engine.state.plain_encode import encode as encode_plain
from shardproof.engine.state.plain_types import (
    StreamBytes as StreamBytes,  # not listed in __all__: internal
)
from shardproof.engine.state.plain_types import by_name as by_name  # not listed in __all__: internal
from shardproof.engine.state.plain_types import has_names as has_names  # not listed in __all__: internal
from shardproof.engine.state.plain_types import register_by_name, register_dataclass, register_enum
from shardproof.engine.state.plain_types import (
    with_targets as with_targets,  # not listed in __all__: internal
)
from shardproof.engine.state.records import (
    Binding,
    Catalogue,
    Collected,
    Mismatch,
    ObjectEntry,
    Piece,
    Stepped,
    TensorEntry,
    is_plain_memory,
    memory_of,
)
from shardproof.engine.state.subclass_binding import StoredWrapper
from shardproof.engine.state.tensors import as_bytes, declare_storage_owner, storage_owner
from shardproof.engine.state.tree import bind, collect
from shardproof.engine.state.visitor import Place as Place  # not listed in __all__: internal

__all__ = [
    "LAYOUTS",
    "LOCAL",
    "MASTER",
    "Binding",
    "Catalogue",
    "Collected",
    "Fence",
    "FlatShard",
    "LastWalk",
    "Layout",
    "LocalRange",
    "LocalShards",
    "Mismatch",
    "ObjectEntry",
    "OptimizerState",
    "ParameterSlots",
    "PerRank",
    "Piece",
    "RandomState",
    "Receipt",
    "SlotProvider",
    "Stepped",
    "StoredSlot",
    "StoredWrapper",
    "TensorEntry",
    "as_bytes",
    "bind",
    "canonical_json",
    "collect",
    "declare",
    "declare_storage_owner",
    "decode_plain",
    "dtensor_index_map",
    "encode_plain",
    "hoisted_tensor",
    "inside",
    "is_dtensor",
    "is_plain_memory",
    "is_sharded",
    "local_layout",
    "local_tensor",
    "memory_of",
    "number_expert",
    "open_all",
    "optimizer_state_dicts",
    "options_of",
    "owner_of",
    "parts_of",
    "receiver",
    "references",
    "register_by_name",
    "register_dataclass",
    "register_enum",
    "rename",
    "share",
    "slots_of",
    "storage_owner",
    "with_new_key",
]
