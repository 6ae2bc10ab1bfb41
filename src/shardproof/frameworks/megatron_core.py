"""shardproof as a backend of Megatron-Core's ``dist_checkpointing``.

Import this module in place of Megatron's. Its functions have the same names and arguments:

    from shardproof.frameworks import megatron_core as dist_checkpointing

    dist_checkpointing.save(sharded_state_dict, folder)
    state_dict = dist_checkpointing.load(sharded_state_dict, folder)

Every other name of this module is Megatron's own. `save` writes checkpoints of shardproof. `load` reads
them, and every other checkpoint with Megatron's own functions. For a checkpoint of shardproof, no function of
this module runs a collective: the ranks meet at a rendezvous of shardproof. The import registers the backend
``("shardproof", 1)`` with Megatron-Core 0.16, whose own functions then save with it and recognize it in a
checkpoint. It also mends two methods of the DistributedOptimizer; see
`shardproof.frameworks.megatron.megatron_optimizer.mend_distributed_optimizer`.
"""

from __future__ import annotations

import os
from typing import Any

from megatron.core import dist_checkpointing as mcore
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel

from shardproof.errors import StructureError
from shardproof.frameworks.megatron.megatron_load import (
    check_is_distributed_checkpoint,
    get_default_load_sharded_strategy,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from shardproof.frameworks.megatron.megatron_optimizer import (
    load_optimizer_state,
    mend_distributed_optimizer,
    optimizer_state,
)
from shardproof.frameworks.megatron.megatron_save import begin_save, get_default_save_sharded_strategy, save
from shardproof.frameworks.megatron.megatron_strategies import BACKEND, VERSION, LoadStrategy, SaveStrategy

__all__ = [
    "BACKEND",
    "VERSION",
    "LoadStrategy",
    "SaveStrategy",
    "StrictHandling",
    "begin_save",
    "check_is_distributed_checkpoint",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "live_state",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_live_state",
    "load_optimizer_state",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "optimizer_state",
    "remove_sharded_tensors",
    "save",
]


def __getattr__(name: str) -> Any:
    """Names that shardproof does not replace are those of `megatron.core.dist_checkpointing`."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(mcore, name)


def _register() -> None:
    """Registers ``("shardproof", 1)`` with Megatron-Core 0.16. Newer releases have no registry of names."""
    try:
        from megatron.core.dist_checkpointing.strategies import base
    except ImportError:
        return
    strategy = get_default_save_sharded_strategy()
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, BACKEND, VERSION, strategy)
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())


_register()
mend_distributed_optimizer()


def live_state(
    module: Any, optimizer: Any, *, checkpoint_dir: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The sharded state dict of a model and its distributed optimizer, without a collective.

    Args:
        module: the model, or the list of its chunks on this rank, as Megatron's ``get_model`` returns it.
            Keys do not depend on DistributedDataParallel and Float16Module around a chunk.
        optimizer: see `optimizer_state`.
        checkpoint_dir: for a load, the checkpoint.

    Returns:
        The states under "model" and "optimizer". Those of several chunks, which virtual pipeline stages are,
        have the names that Megatron gives them: "model0", "model1" and so on.

    Raises:
        StructureError: the list of chunks is empty.
    """
    models = {name: chunk.sharded_state_dict() for name, chunk in _chunks(module).items()}
    stored = None if checkpoint_dir is None else load_tensors_metadata(checkpoint_dir)
    return {**models, "optimizer": optimizer_state(optimizer, models, stored)}


def load_live_state(
    module: Any, optimizer: Any, state: dict[str, Any], checkpoint_dir: str | os.PathLike[str]
) -> dict[str, Any]:
    """Loads a checkpoint into a model and its distributed optimizer. All ranks call it.

    Args:
        module: see `live_state`.
        optimizer: see `optimizer_state`.
        state: the result of `live_state`, with any other entries to load.
        checkpoint_dir: the checkpoint that `live_state` was called with.

    Returns:
        The loaded state dict, with the common state.

    Raises:
        StructureError: `state` has other chunks than `module`. Nothing is loaded.
    """
    chunks = _chunks(module)
    described = {name for name in state if name.startswith("model") and name[len("model") :].isdigit()}
    described |= {"model"} & state.keys()
    if described != chunks.keys():
        raise StructureError(
            f"the model has another number of chunks: {len(described)} in the state "
            f"({', '.join(sorted(described))}), and {len(chunks)} in the call ({', '.join(chunks)}). Pass "
            "the chunks that live_state was called with"
        )
    loaded = dict(load(state, checkpoint_dir))
    for name, chunk in chunks.items():
        chunk.load_state_dict(loaded[name])
    load_optimizer_state(optimizer, loaded["optimizer"])
    return loaded


def _chunks(module: Any) -> dict[str, Any]:
    """The chunks of a model on this rank, without DistributedDataParallel, by their names in a state."""
    chunks = module if isinstance(module, (list, tuple)) else [module]
    if not chunks:
        raise StructureError(
            "the list of the model's chunks is empty. Pass the model, or all chunks of this rank"
        )
    inner = [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]
    return {"model": inner[0]} if len(inner) == 1 else {f"model{at}": item for at, item in enumerate(inner)}
