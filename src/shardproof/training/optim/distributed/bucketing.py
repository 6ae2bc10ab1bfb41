"""Assigns a module's parameters to flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from shardproof._utils.arguments import warn_of_row_major_copies
from shardproof.engine.state import local_tensor
from shardproof.training.optim.distributed.flat_bucket import FlatBucket, RankGroup, RankGroups, Weight, pack

_ALIGNMENT = 16
"""Alignment of every parameter and every rank's range, in bytes, for vectorised kernels."""

ParamGroups = Iterable[Mapping[str, Any]] | Callable[[str, torch.nn.Parameter], Mapping[str, Any]] | None


def groups_of(
    module: torch.nn.Module, given: ParamGroups
) -> tuple[list[dict[str, Any]], list[torch.nn.Parameter]]:
    """Convert `param_groups` to groups as torch's optimizers accept them, and separate frozen parameters."""
    if given is None:
        groups: list[dict[str, Any]] = [{"params": list(module.parameters())}]
    elif callable(given):
        groups = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                options = dict(given(name, parameter))
                for group in groups:
                    if {key: item for key, item in group.items() if key != "params"} == options:
                        group["params"].append(parameter)
                        break
                else:
                    groups.append({**options, "params": [parameter]})
    else:
        groups = [{**group, "params": _parameters(group["params"])} for group in given]
    known = (
        module.parameters()
        if given is None or callable(given)
        else chain.from_iterable(group["params"] for group in groups)
    )
    frozen = [item for item in known if not item.requires_grad]
    for group in groups:
        group["params"] = [item for item in group["params"] if item.requires_grad]
    if not any(group["params"] for group in groups):
        raise ValueError("no parameter to step: no parameter requires a gradient, or param_groups is empty")
    return groups, frozen


def _parameters(given: Any) -> list[Any]:
    items = [given] if isinstance(given, torch.Tensor) else list(given)
    return [item[1] if isinstance(item, tuple) else item for item in items]


def make_weights(module: torch.nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[Weight]:
    """The parameters of all groups, in the module's order of registration."""
    row_of: dict[torch.Tensor, int] = {}
    for row, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter in row_of:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is in two groups, or twice in one"
                )
            row_of[parameter] = row
    mesh = next((item.device_mesh for item in row_of if hasattr(item, "device_mesh")), None)
    weights = []
    strided = []
    for name, parameter in module.named_parameters():
        if parameter in row_of:
            local = local_tensor(parameter)
            if local.is_meta:
                raise ValueError(
                    f"{name} is on the meta device: call to_empty and initialise it, then make the optimizer"
                )
            if not local.is_floating_point():
                raise ValueError(f"{name} is {local.dtype}; parameters must be real floating-point")
            if not local.is_contiguous():
                strided.append(name)
            holder = module.get_submodule(name.rpartition(".")[0])
            weights.append(
                Weight(name, parameter, row_of.pop(parameter), _counted(parameter, mesh), holder._parameters)
            )
    if row_of:
        shapes = [list(parameter.shape) for parameter in row_of]
        raise ValueError(f"param_groups has parameters that are not the module's, of shapes {shapes[:5]}")
    warn_of_row_major_copies(strided, "DistributedOptimizer")
    return weights


def check_same(
    weights: Sequence[Weight], groups: RankGroups, is_expert: Callable[[str, torch.nn.Parameter], bool]
) -> None:
    """Check that all ranks of a group have the same parameters, so that their collectives match.

    Raises:
        ValueError: the parameters differ between ranks.
    """
    lines: dict[bool, list[str]] = {False: [], True: []}
    for weight in weights:
        local = local_tensor(weight.parameter)
        line = f"{weight.name} {list(local.shape)} {local.dtype} of group {weight.group}"
        lines[is_expert(weight.name, weight.parameter)].append(line)
    device = local_tensor(weights[0].parameter).device
    groups.data.check_same("\n".join(lines[False]), device, "the list of parameters")
    if groups.expert is not groups.data:
        groups.expert.check_same("\n".join(lines[True]), device, "the list of expert parameters")


def model_ranks(weights: Sequence[Weight], given: dist.ProcessGroup | None) -> RankGroup | None:
    """The ranks with the other parts of the model: `given`, or the tensor-parallel mesh."""
    if given is not None:
        return RankGroup(given)
    meshes: list[Any] = []
    for weight in weights:
        mesh = getattr(weight.parameter, "device_mesh", None)
        if mesh is not None and mesh not in meshes:
            meshes.append(mesh)
    if not meshes:
        return None
    if len(meshes) > 1 or meshes[0].ndim != 1:
        raise ValueError(
            f"parameters are on {len(meshes)} device meshes, the first of {meshes[0].ndim} dimensions. Set "
            "model_group= to all ranks with other parts of this rank's model"
        )
    return RankGroup(meshes[0].get_group())


def make_buckets(
    weights: Sequence[Weight],
    groups: RankGroups,
    is_expert: Callable[[str, torch.nn.Parameter], bool],
    gradient_dtype: torch.dtype | None,
    bucket_bytes: int,
) -> list[FlatBucket]:
    """Make flat buckets, in the order in which backward is expected to fill them."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for row in reversed(range(len(weights))):
        weight = weights[row]
        local = local_tensor(weight.parameter)
        expert = is_expert(weight.name, weight.parameter)
        kinds.setdefault((expert, local.dtype, local.device), []).append(row)
    made: list[tuple[int, FlatBucket]] = []
    for (expert, dtype, _), rows in kinds.items():
        ranks = groups.expert if expert else groups.data
        summed = gradient_dtype or dtype
        sizes = [(row, local_tensor(weights[row].parameter).numel()) for row in rows]
        for bucket in pack(
            sizes,
            limit=max(1, bucket_bytes // summed.itemsize),
            ranks=ranks.size,
            align=max(1, _ALIGNMENT // dtype.itemsize),
        ):
            members = [weights[span.parameter] for span in bucket.spans]
            made.append((bucket.spans[-1].parameter, FlatBucket(bucket, ranks, members, summed)))
    made.sort(key=lambda item: -item[0])
    return [bucket for _, bucket in made]


def _counted(parameter: torch.Tensor, mesh: Any) -> bool:
    """Return True if norms include the parameter on this rank, for one of its replicas only."""
    placements = getattr(parameter, "placements", None)
    if placements is not None:
        coordinate = parameter.device_mesh.get_coordinate()  # type: ignore[attr-defined]
        return all(at == 0 for at, item in zip(coordinate, placements, strict=True) if item.is_replicate())
    return mesh is None or not any(mesh.get_coordinate())
