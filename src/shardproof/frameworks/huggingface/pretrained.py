"""Loads a sharded model from the files of Hugging Face, and writes such files from it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from copy import deepcopy
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import torch
from transformers import PreTrainedConfig, PreTrainedModel

import shardproof as sp
from shardproof._utils.humanize import listed
from shardproof.engine.foreign import foreign_of
from shardproof.engine.loading import Patterns, open_storage
from shardproof.engine.planning import selects
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous, connected
from shardproof.engine.state import inside, is_dtensor, local_tensor
from shardproof.engine.storage import LocalStorage, StrOrBytesPath, publish_path
from shardproof.frameworks.huggingface.weight_plan import (
    FileTensors,
    plan_load,
    plan_save,
    state_of,
    tensors_of,
)


def load_pretrained(
    model: PreTrainedModel,
    path: StrOrBytesPath,
    *,
    dtype: torch.dtype | None = None,
    exclude: Patterns = None,
    device: torch.device | str | None = None,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
) -> sp.LoadReport:
    """Fills a model from a folder that `from_pretrained` opens. Called by every rank.

    Tensors on the meta device get memory for this rank's part only. The model may be sharded by
    `fully_shard`, by tensor parallelism, by both, or not at all. A parameter stays the same object, so ties
    and optimizers keep it.

    Buffers that the files do not hold, such as rotary frequencies, are computed by the model's own
    ``_init_weights``, as in `from_pretrained`. A buffer that it does not compute is an error.

    Args:
        model: a model of transformers.
        path: the folder, or any checkpoint that `shardproof.open` reads and that has the keys of such files.
        dtype: dtype of the parameters on the meta device, as in `from_pretrained`. Parameters that the model
            keeps in float32 stay in float32. None: the dtypes that they have. Stored values are converted.
        exclude: patterns (`fnmatch`) of stored keys to ignore.
        device: where tensors on the meta device get memory; None for the device of the model's mesh, or the
            CPU if it has no mesh.
        rendezvous: the rendezvous of the ranks; None to find it.
        deadline: seconds that a rank may be silent; see `shardproof.load`.

    Returns:
        What this rank read.

    Raises:
        TypeError: `model` is not a model of transformers.
        KeyMismatchError: the folder lacks a tensor of the model, has one that the model does not know, or has
            another shape.
        StructureError: a conversion or a buffer of the model is not supported, or a tie is broken.
        ShardproofError: see `shardproof.load`.

    Example:
        >>> load_pretrained(model, "Llama-3.2-1B", dtype=torch.bfloat16)  # doctest: +SKIP
    """
    model, location = _checked(model), os.fsdecode(path)
    plan: FileTensors = {}
    ignored: list[str] = []

    def prepare() -> None:
        with open_storage(foreign_of(path), warn=False) as checkpoint:
            stored = checkpoint.catalogue()
        keep = selects(None, exclude)
        plan.update(
            plan_load(
                model, {key: shape for key, (_, shape) in stored.tensors.items() if keep(key)}, location
            )
        )
        ignored.extend(key for key in (*stored.tensors, *stored.objects) if key not in plan)
        filled = {name for _, boxes in plan.values() for name, _ in boxes}
        computed = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in filled]
        materialize(model, dtype, device)
        compute_buffers(model, computed)

    with connected(rendezvous, deadline) as ranks:
        _together(ranks, f"load {location} into {type(model).__name__}", "prepare", prepare, lambda: None)
        return sp.load(
            path, dict(state_of(model, plan)), exclude=ignored or None, cast=True, rendezvous=ranks
        )


def save_pretrained(
    model: torch.nn.Module,
    folder: StrOrBytesPath,
    *,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
) -> sp.ConversionReport:
    """Writes a model as a folder that `from_pretrained` opens. Called by every rank.

    No rank gathers the model. Each rank writes its part to a checkpoint in ``FOLDER.exporting``. The ranks
    share the conversion of this checkpoint to ``model-0000x-of-N.safetensors``, and verify the written files.
    Then rank 0 adds ``config.json`` and ``generation_config.json``, and moves the folder to its name.

    The tensors are stored as transformers stores them: experts one by one, tied tensors once.

    Args:
        model: a model of transformers, sharded or not. FSDP1 may wrap it (`FullyShardedDataParallel`).
        folder: path of the new folder. The disk needs room for the model twice.
        config: configuration to write as ``config.json``; None for the model's own.
        dtype: dtype of the floating point tensors in the files; None to leave it unchanged.
        max_file_bytes: bytes of tensors in one file, at most, unless a single tensor is larger.
        rendezvous: the rendezvous of the ranks; None to find it.
        deadline: seconds that a rank may be silent; see `shardproof.load`.

    Returns:
        What was written.

    Raises:
        TypeError: `model` is not a model of transformers.
        AlreadyCommittedError: `folder` exists.
        StructureError: a conversion of the model is not supported, or a tie is broken.
        ShardproofError: see `shardproof.save` and `shardproof.convert`.

    Example:
        >>> save_pretrained(model, "trained", dtype=torch.bfloat16)  # doctest: +SKIP
    """
    model = getattr(model, "_orig_mod", model)
    inner = _checked(inside(model))
    target = LocalStorage(os.path.abspath(os.fsdecode(folder))).path
    work = target.with_name(f"{target.name}.exporting")
    operation = f"export {type(inner).__name__} to {target}"
    plan: FileTensors = {}

    def begin() -> None:
        if os.path.lexists(target):
            raise sp.AlreadyCommittedError(
                f"{target} exists. It was not touched: choose another folder, or remove it", path=str(target)
            )
        if work.exists():  # an interrupted export left it
            shutil.rmtree(work)

    def publish() -> None:
        _write_configs(inner, config, dtype, work)
        publish_path(work / "model", target)
        shutil.rmtree(work)

    with connected(rendezvous, deadline) as ranks:
        _together(
            ranks, operation, "prepare", lambda: plan.update(plan_save(inner, tensors_of(model))), begin
        )
        sp.save(work / "state", dict(state_of(model, plan)), rendezvous=ranks)
        report = sp.convert(
            work / "state",
            work / "model",
            to="hf",
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            max_file_bytes=max_file_bytes,
            rendezvous=ranks,
        )
        _together(ranks, operation, "publish", lambda: None, publish)
    return msgspec.structs.replace(report, source=type(inner).__name__, location=str(target))


def _checked(model: Any) -> PreTrainedModel:
    """The model without the wrapper of `torch.compile`."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"expected a PreTrainedModel of transformers, found {type(model).__name__}. Give the model "
            "inside wrappers such as DistributedDataParallel or PeftModel, and fill a model before "
            "FullyShardedDataParallel (FSDP1) wraps it"
        )
    if getattr(inner, "hf_quantizer", None) is not None:
        raise TypeError("a quantized model is not supported: load it with from_pretrained")
    return inner


def _together(
    ranks: Rendezvous,
    operation: str,
    phase: str,
    work: Callable[[], None],
    decide: Callable[[], None],
) -> None:
    """Runs `work` on every rank, then `decide` on rank 0. An error of one rank is raised on all ranks."""

    def done() -> sp.ShardproofError | None:
        try:
            work()
        except sp.ShardproofError as error:
            return error
        return None

    with ranks.operation(operation):
        MeetingSequence(ranks, operation).exchange(phase, done, lambda _: decide(), NoneType, NoneType)


def _write_configs(
    model: PreTrainedModel, config: PreTrainedConfig | None, dtype: torch.dtype | None, work: Path
) -> None:
    """Writes ``config.json`` and ``generation_config.json`` durably."""
    config = deepcopy(model.config if config is None else config)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    config.save_pretrained(work / "configs")
    if model.can_generate():
        model.generation_config.save_pretrained(work / "configs")
    files = LocalStorage(work / "model")
    for file in (work / "configs").iterdir():
        files.publish(file.name, file.read_bytes(), replace=True)


_INITIALIZED = "_is_hf_initialized"
"""Attribute of the tensors and modules that `initialize_weights` of transformers leaves as they are."""


def materialize(model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """Allocates uninitialised memory for the tensors on the meta device. Parameters stay the same objects.

    Args:
        model: a model, sharded or not.
        dtype: dtype of the floating point parameters on the meta device; None to leave it unchanged.
        device: device of the memory; None for the device of the model's mesh, or the CPU.

    Raises:
        StructureError: a module has a tensor on the meta device that is neither parameter nor buffer.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise sp.StructureError(
                    f"{path}.{name} is a tensor on the meta device, and neither a parameter nor a buffer, so "
                    "nothing gives it a value. Register it as a buffer, or create it on a real device"
                )
    if device is None:
        mesh = next((tensor.device_mesh for tensor in model.parameters() if is_dtensor(tensor)), None)
        device = "cpu" if mesh is None else mesh.device_type
    dtypes = _dtypes(model, dtype)
    attributes = [(parameter, dict(vars(parameter))) for parameter in model.parameters() if parameter.is_meta]

    def memory(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device=device, dtype=dtypes.get(id(tensor), tensor.dtype))

    # `Module._apply` then changes parameters in place, so that ties, optimizers and `fully_shard` keep them.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad():
            model._apply(memory)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for parameter, values in attributes:
        vars(parameter).update(values)


def compute_buffers(model: PreTrainedModel, names: Collection[str]) -> None:
    """Computes buffers of these names with the model's own ``_init_weights``. All tensors have memory.

    It runs twice, over zeros and over ones. A buffer that differs between the two runs was not computed, or
    not computed in the same way on every rank. Other tensors stay unchanged.
    """
    if not names:
        return
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in names}
    for tensor in (*model.parameters(), *model.buffers()):
        setattr(tensor, _INITIALIZED, True)
    for module in model.modules():
        setattr(module, _INITIALIZED, True)
    first: dict[str, torch.Tensor] = {}
    for fill in (0, 255):
        for name, buffer in buffers.items():
            _bytes(buffer).fill_(fill)
            setattr(buffer, _INITIALIZED, False)
            setattr(model.get_submodule(name.rpartition(".")[0]), _INITIALIZED, False)
        model.initialize_weights()
        first = first or {name: _bytes(buffer).clone() for name, buffer in buffers.items()}
    wrong = [name for name, buffer in buffers.items() if not torch.equal(first[name], _bytes(buffer))]
    if wrong:
        raise sp.StructureError(
            f"_init_weights of {type(model).__name__} does not compute buffers that no file holds: "
            f"{listed(wrong)}. Create the model with these buffers on a real device",
            key=wrong[0],
        )


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    local = local_tensor(buffer).detach()
    if not local.is_contiguous():
        raise sp.StructureError(f"a buffer of shape {list(local.shape)} is not contiguous")
    return local.reshape(-1).view(torch.uint8)


def _dtypes(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """The new dtype of each parameter that gets one, by its id."""
    if dtype is None:
        return {}
    kept = {pattern.replace("*", ".*"): kind for pattern, kind in model._get_dtype_plan(dtype).items()}
    return {
        id(parameter): next((kind for pattern, kind in kept.items() if re.search(pattern, name)), dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.is_floating_point()
    }
