"""Memory for the tensors of a model on the meta device, and values for the buffers that no file holds."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from transformers import PreTrainedModel

import shardproof as sp
from shardproof._utils.humanize import listed
from shardproof.engine.state import is_dtensor, local_tensor

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

    Raises:
        StructureError: ``_init_weights`` does not compute a buffer; the message names it.
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
