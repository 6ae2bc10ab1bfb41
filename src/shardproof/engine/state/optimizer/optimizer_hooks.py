"""The hooks of an optimizer's ``state_dict`` and ``load_state_dict``, and its overridden ``load_state_dict``.

A save and a load read and write the slots themselves. At the end of a load, an optimizer with pre-hooks or
an overridden ``load_state_dict`` gets its own state dict, whose tensors are its slots. Post-hooks run last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardproof.engine.state.handlers.module_hooks import is_foreign, method_of
from shardproof.engine.state.visitor import Place
from shardproof.errors import ShardproofError, StructureError


def overrides(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """True if the program replaced a method of torch's optimizers, on the class or on the object.

    A class that describes its slots itself replaces torch's state dict, and with it its own two methods.
    """
    own = method_of(optimizer, method)
    if own is getattr(torch.optim.Optimizer, method) or not is_foreign(own):
        return False
    classes = [vars(kind) for kind in (optimizer, *type(optimizer).__mro__)]
    first = next(names for names in classes if method in names or "receive_slots" in names)
    return "receive_slots" not in first


def before_save(optimizer: torch.optim.Optimizer, place: Place, *, only_slots: bool) -> None:
    """Calls the pre-hooks of ``state_dict``.

    Args:
        optimizer: the optimizer.
        place: its place.
        only_slots: True for an `OptimizerState`, which declares that there is no other state.

    Raises:
        StructureError: the optimizer has post-hooks of ``state_dict``, whose changes a save would lose.
    """
    posts = filter(is_foreign, _hooks(optimizer, "_optimizer_state_dict_post_hooks"))
    if not only_slots and (hook := next(posts, None)) is not None:
        remedy = "If it adds no state, save shardproof.OptimizerState(optimizer, model)"
        if getattr(hook, "__module__", "").startswith("megatron_fsdp."):
            remedy = "Save shardproof.frameworks.megatron_fsdp.optimizer_state(optimizer, model)"
        raise StructureError(
            f"{place.path}: {type(optimizer).__qualname__} has the post-hook of state_dict {_name(hook)}, "
            f"whose changes would be lost. {remedy}",
            key=place.key,
        )
    for hook in filter(is_foreign, _hooks(optimizer, "_optimizer_state_dict_pre_hooks")):
        hook(optimizer)


def after_load(
    optimizer: torch.optim.Optimizer, place: Place, *, only_slots: bool, has_slots: bool
) -> Callable[[], None] | None:
    """Returns the call for the end of a load; None if the optimizer has no hooks.

    Args:
        optimizer: the optimizer.
        place: its place.
        only_slots: as for `before_save`. The optimizer's own ``load_state_dict`` is then not called.
        has_slots: True if `optimizer.state` has the slots. Otherwise the optimizer has another way to receive
            them than ``load_state_dict``. It replaces the hooks that the module of its class registers.

    Raises:
        StructureError: a pre-hook needs a state dict that the load does not have.
    """
    kind = type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return None  # a `SlotProvider` of an adapter
    replaced = kind.__module__ if not has_slots else None
    has_slots = has_slots and method_of(optimizer, "state_dict") is torch.optim.Optimizer.state_dict
    is_torch = method_of(optimizer, "load_state_dict") is torch.optim.Optimizer.load_state_dict
    has_own = not only_slots and overrides(optimizer, "load_state_dict")
    pres, posts = (
        [
            hook
            for hook in _hooks(optimizer, registry)
            if is_foreign(hook) and getattr(hook, "__module__", "") != replaced
        ]
        for registry in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    )
    pre = next(iter(pres), None)
    if (pre is not None or has_own) and not has_slots:
        what = "an own load_state_dict" if pre is None else f"the pre-hook of load_state_dict {_name(pre)}"
        raise StructureError(
            f"{place.path}: {kind.__qualname__} has {what}, which needs the optimizer's state dict. A load "
            "does not make one for this optimizer. Remove it, and change the state after the load",
            key=place.key,
        )
    if has_own or pre is not None:
        return lambda: _named(lambda: _load(optimizer, keeps_dtypes=is_torch), optimizer, place)
    if posts:
        return lambda: _named(lambda: [hook(optimizer) for hook in posts], optimizer, place)
    return None


def _load(optimizer: torch.optim.Optimizer, *, keeps_dtypes: bool) -> None:
    """Gives the optimizer its own state dict.

    torch casts slots to the dtype of their parameter. With `keeps_dtypes`, they keep that of the state dict.
    """
    seen: list[Any] = []
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state))
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        handle.remove()
    if not keeps_dtypes:
        return
    numbers = [number for group in seen[0]["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        slots = optimizer.state.get(parameter, {})
        for slot, item in seen[0]["state"].get(number, {}).items():
            if isinstance(item, torch.Tensor) and slots[slot].dtype != item.dtype:
                slots[slot] = item


def _named(call: Callable[[], Any], optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Calls a hook. Its error names the optimizer."""
    try:
        call()
    except ShardproofError:
        raise
    except Exception as error:
        raise StructureError(
            f"{place.path}: load_state_dict of {type(optimizer).__qualname__}, or a hook of it, raised "
            f"{type(error).__name__}: {error}",
            key=place.key,
        ) from error


def _hooks(optimizer: torch.optim.Optimizer, registry: str) -> list[Callable[..., Any]]:
    return list(getattr(optimizer, registry, {}).values())


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", repr(hook))
