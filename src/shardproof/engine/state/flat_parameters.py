"""The parameters of FSDP1 (torch's `FullyShardedDataParallel`), as ranges of each rank's flat shard.

FSDP1 concatenates the parameters of a module to one flat parameter. Each rank has a range of it, which cuts
parameters between two elements. The ``state_dict`` of FSDP1 gathers parameters, so this module reads the
offsets that FSDP1 stores with each flat parameter instead. It does not communicate.

torch has no public names for the offsets. They are the same from torch 2.6 to 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardproof.engine.state.local_shards import FlatShard, LocalShards
from shardproof.engine.state.module_names import EXTRA_STATE, NamedModule, clean_name
from shardproof.errors import StructureError


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """One parameter of the model in a flat parameter."""

    name: str
    """Name in the module."""
    meta: torch.nn.Parameter
    """A parameter without memory, with the global shape and dtype. Tied parameters share it."""
    trained: torch.Tensor
    """The parameter that an optimizer trains: the flat one, or the parameter of ``use_orig_params=True``."""
    shard: torch.Tensor
    """The elements on this rank, 1-D."""
    start: int
    """Row-major position of the first element in the parameter."""
    offset: int
    """Position of the first element in `trained` on this rank."""

    def described(self) -> FlatShard:
        """The elements on this rank, as a part of the parameter."""
        return FlatShard(self.shard, self.meta.shape, self.start, self.start + self.shard.numel())


def _fsdp1() -> type | None:
    """The class of FSDP1; None if the program has not imported it."""
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return getattr(module, "FullyShardedDataParallel", None)


def is_flat(module: NamedModule) -> bool:
    """True if FSDP1 wraps the module or a part of it."""
    kind = _fsdp1()
    return kind is not None and any(isinstance(part, kind) for _, part in module.parts)


def is_in_flat(parameter: torch.Tensor) -> bool:
    """True for a parameter that FSDP1 manages: a flat one, or a rank's range of one of the model's."""
    return hasattr(parameter, "_fsdp_flattened")


def flat_parts(module: NamedModule, path: str, *, load: bool = False) -> list[FlatPart]:
    """The parameters in the flat parameters of a module, also those with no element on this rank.

    With `load`, the parameters are to be filled.

    Raises:
        StructureError: FSDP1 has gathered the parameters, and their shards are not valid now.
    """
    kind: Any = _fsdp1()
    parts: list[FlatPart] = []
    for prefix, part in module.parts:
        handle = getattr(part, "_handle", None) if isinstance(part, kind) else None
        if handle is not None:
            _check_is_sharded(handle, path, load)
            parts += _of_handle(handle, f"{prefix}." if prefix else "")
    return parts


def _check_is_sharded(handle: Any, path: str, load: bool) -> None:
    flat = handle.flat_param
    if handle._training_state.name == "SUMMON_FULL_PARAMS":
        raise StructureError(f"{path}: save and load outside FullyShardedDataParallel.summon_full_params")
    has_gathered = handle.uses_sharded_strategy and hasattr(flat, "_full_param_padded")
    if load and has_gathered and not handle.needs_unshard():
        raise StructureError(
            f"{path}: FSDP1 keeps gathered parameters between a forward and a backward pass, and after an "
            "evaluation. Load before the first forward pass, or after a backward pass"
        )


def _of_handle(handle: Any, prefix: str) -> Iterator[FlatPart]:
    flat = handle.flat_param
    # Gathered parameters are copies: the optimizer steps the local shard.
    shard = getattr(flat, "_local_shard", flat).detach().view(-1)
    originals = flat._params if handle._use_orig_params else None
    parts: dict[tuple[Any, str], FlatPart] = {}
    for row, (fqn, shape, info) in enumerate(
        zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        offset, count = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
        owner = flat._param_infos[row]
        part = FlatPart(
            prefix + fqn,
            torch.nn.Parameter(torch.empty(shape, dtype=shard.dtype, device="meta"), flat.requires_grad),
            flat if originals is None else originals[row],
            shard[offset : offset + count] if count else shard.new_empty(0),
            info.intra_param_start_idx if info.in_shard else 0,
            offset if originals is None else 0,
        )
        parts[owner.module, owner.param_name] = part
        yield part
    for tied in flat._shared_param_infos:
        first = parts[tied.prim_module, tied.prim_param_name]
        name = f"{tied.module_name}.{tied.param_name}" if tied.module_name else tied.param_name
        yield FlatPart(prefix + name, first.meta, first.trained, first.shard, first.start, first.offset)


def flat_state(module: NamedModule, parts: Iterable[FlatPart]) -> dict[str, Any]:
    """The state of a module of which FSDP1 wraps a part: name to `FlatShard`, tensor or extra state.

    Raises:
        StructureError: a parameter is tied to one of another flat parameter.
    """
    state: dict[str, Any] = {part.name: part.described() for part in parts}
    flat = {clean_name(name) for name in state}
    for path, part in module.parts:
        prefix = f"{path}." if path else ""
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or name in part._non_persistent_buffers_set:
                continue
            if not is_in_flat(tensor):
                state[prefix + name] = tensor
            elif not hasattr(tensor, "_fqns") and clean_name(prefix + name) not in flat:
                raise StructureError(
                    f"{clean_name(prefix + name)} is tied to a parameter of another FullyShardedDataParallel "
                    "module. FSDP1 ties parameters of one module only: wrap both in the same one"
                )
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            state[prefix + EXTRA_STATE] = part.get_extra_state()
    return state


def flat_tensors(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, LocalShards | None]]:
    """The parameters and persistent buffers of a module of which FSDP1 wraps a part, by name in the model.

    Returns:
        For a parameter of FSDP1: a parameter without memory, which tied parameters share, with the global
        shape and dtype; and the elements on this rank. For other tensors: the tensor and None. An empty dict
        if FSDP1 wraps no part of the module.

    Raises:
        StructureError: see `flat_parts` and `flat_state`.

    >>> flat_tensors(torch.nn.Linear(2, 2))
    {}
    """
    named = NamedModule(module)
    if not is_flat(named):
        return {}
    parts = flat_parts(named, type(module).__name__)
    tensors: dict[str, tuple[torch.Tensor, LocalShards | None]] = {
        named.clean(part.name): (part.meta, part.described().sharded()) for part in parts
    }
    for name, item in flat_state(named, parts).items():
        if isinstance(item, torch.Tensor):
            tensors[named.clean(name)] = item, None
    return tensors
