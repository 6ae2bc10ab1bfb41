"""Loads a checkpoint that DeepSpeed wrote itself into a live engine, in any layout.

The reader of `shardproof.interop` describes the files with the keys of docs/migrate.md. Each rank reads its
own ranges.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import shardproof as sp
from shardproof.state import MASTER, LocalRange, Receipt, StoredSlot, options_of

__all__ = ["is_of_deepspeed", "load_files"]

_MARK = "ds_version"
_OF_ENGINE = ("global_steps", "global_samples", "skipped_steps")
_NO_CLIENT_STATE = (
    *_OF_ENGINE,
    _MARK,
    "checkpoint_parallel_dimensions",
    "data_sampler",
    "dp_world_size",
    "ds_config",
    "fp32",
    "lr_scheduler",
    "module",
    "mp_world_size",
    "optimizer",
    "random_ltd",
)
"""First segments of the keys that DeepSpeed writes. All others are the program's."""
_OF_THE_PROGRAM = ("params", "fused", "foreach", "capturable", "differentiable")


def is_of_deepspeed(path: str | os.PathLike[str]) -> bool:
    """True for a tag folder that `engine.save_checkpoint` wrote."""
    with sp.open(path) as checkpoint:
        return _MARK in checkpoint


def load_files(path: str | os.PathLike[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """Loads a tag folder of DeepSpeed.

    Args:
        path: the folder.
        state: the state of the engine; see `shardproof.frameworks.deepspeed.engine_state`.

    Returns:
        The client state.

    Raises:
        KeyMismatchError: the checkpoint lacks a parameter or a slot, or has another shape.
    """
    with _opened(path) as checkpoint:
        names = [name for name in state["model"].state_dict() if f"fp32.{name}" not in checkpoint]
        # Stage 1 has frozen parameters in the dtype of training only.
        elsewhere = {f"fp32.{name}": f"module.{name}" for name in names if f"module.{name}" in checkpoint}
        sp.load(path, {"fp32": state["model"]}, include="fp32", rename=elsewhere, cast=True)
        # Masters are the rounded weights now.
        objects = {key: checkpoint[key] for key in checkpoint if key in checkpoint.objects}
        _load_optimizer(path, checkpoint, state["optimizer"].optimizer)
    engine = state["engine"]
    present = engine.state_dict()
    scaler, scheduler = _below(objects, "optimizer.loss_scaler"), _below(objects, "lr_scheduler")
    engine.load_state_dict(
        {
            **present,
            **{name: objects.get(name, present[name]) for name in _OF_ENGINE},
            "lr_scheduler": scheduler if isinstance(scheduler, dict) else None,
            "loss_scaler": scaler or {},
            "overflow": objects.get("optimizer.overflow", False),
        }
    )
    own = {key: value for key, value in objects.items() if key.split(".")[0] not in _NO_CLIENT_STATE}
    return {name: _below(own, name) for name in {key.split(".")[0]: None for key in own}}


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The files, which each rank opens. An error reaches all ranks."""
    with ExitStack() as stack:
        opened: list[Any] = []

        def open_files() -> bytes:
            opened.append(stack.enter_context(sp.open(path)))
            return b""

        meetings = sp.rendezvous.MeetingSequence(sp.rendezvous.connect(), f"load {os.fspath(path)}")
        meetings.meet("open", open_files, lambda _: b"")
        yield opened[0]


def _load_optimizer(path: str | os.PathLike[str], checkpoint: Any, keeper: Any) -> None:
    """Loads masters and slots into their ranges, and the options of the groups."""
    keys = checkpoint.keys()
    masters: dict[str, Any] = {}
    slots: dict[str, dict[str, Any]] = {}
    receipts: dict[str, Receipt] = {}
    for name, parameter in keeper.names.items():
        prefix = f"optimizer.state.{name}."
        found = [key for key in keys if key.startswith(prefix)]
        tensors = {key.removeprefix(prefix): key for key in found if key not in checkpoint.objects}
        stored = {
            slot: StoredSlot(getattr(torch, checkpoint.dtype(key)), tuple(checkpoint.shape(key)))
            for slot, key in tensors.items()
        }
        receipt = keeper.receive_slots(parameter, stored)
        slots[name] = {
            key.removeprefix(prefix): checkpoint[key] for key in found if key not in tensors.values()
        }
        slots[name] |= {slot: _place(receipt.tensors[slot], parameter) for slot in stored}
        if MASTER in receipt.tensors:
            masters[name] = _place(receipt.tensors[MASTER], parameter)
        receipts[name] = receipt
    tree = {"fp32": masters, "optimizer": {"state": slots}}
    include = ["optimizer.state", *(f"fp32.{name}" for name in masters)]
    sp.load(path, {key: value for key, value in tree.items() if value}, include=include)
    for name, receipt in receipts.items():
        values = {slot: item for slot, item in slots[name].items() if slot not in receipt.tensors}
        receipt.attach(values, frozenset(receipt.tensors))
    _set_options(checkpoint, keeper)


def _place(item: torch.Tensor | LocalRange, parameter: torch.Tensor) -> torch.Tensor | sp.FlatShard:
    if isinstance(item, LocalRange):
        return sp.FlatShard(item.buffer, tuple(parameter.shape), item.start, item.stop)
    return item


def _set_options(checkpoint: Any, keeper: Any) -> None:
    """Sets the options of each group to those of its parameters in the checkpoint."""
    stored = {}
    number = 0
    while f"optimizer.param_groups.{number}.params" in checkpoint:
        for name in checkpoint[f"optimizer.param_groups.{number}.params"]:
            stored[name] = number
        number += 1
    names = {id(parameter): name for name, parameter in keeper.names.items()}
    for group in keeper.param_groups:
        numbers = {stored.get(names[id(parameter)]) for parameter in group["params"]} - {None}
        if len(numbers) != 1:
            continue  # the parameters have other groups in the checkpoint: the program's options stay
        prefix = f"optimizer.param_groups.{numbers.pop()}."
        for option in options_of(group, _OF_THE_PROGRAM):
            if f"{prefix}{option}" in checkpoint.objects:
                group[option] = checkpoint[f"{prefix}{option}"]


def _below(objects: Mapping[str, Any], name: str) -> Any:
    """The plain value at a key, as nested dicts if the checkpoint has keys below it; None without any."""
    if name in objects:
        return objects[name]
    nested: dict[str, Any] = {}
    for key, value in objects.items():
        if key.startswith(f"{name}."):
            *path, last = key.removeprefix(f"{name}.").split(".")
            place = nested
            for segment in path:
                place = place.setdefault(segment, {})
            place[last] = value
    return nested or None
