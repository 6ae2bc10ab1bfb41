"""Loads a checkpoint that DeepSpeed wrote itself into a live engine, in any layout.

The reader of `shardproof.formats` describes the files with the keys in docs/migrate.md. Each rank reads its
own ranges.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

import shardproof as sp
from shardproof.engine.state import MASTER, LocalRange, Receipt, StoredSlot, options_of
from shardproof.frameworks.shared.rank_work import on_every_rank

_MARK = "ds_version"
_STATE = "optimizer.state."
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
    """Loads a tag folder of DeepSpeed into the result of `engine_state`. Returns the client state.

    Raises:
        KeyMismatchError: the checkpoint lacks a parameter or a slot, or has another shape.
        RankFailure: a rank cannot open the files or set their state. Raised on all ranks.
    """
    rendezvous, operation = sp.rendezvous.connect(), f"load {os.fspath(path)}"
    with ExitStack() as stack:
        opened: list[Any] = []
        on_every_rank(
            rendezvous, operation, "open", lambda: opened.append(stack.enter_context(sp.open(path)))
        )
        checkpoint = opened[0]
        names = [name for name in state["model"].state_dict() if f"fp32.{name}" not in checkpoint]
        # Stage 1 has frozen parameters in the dtype of training only.
        elsewhere = {f"fp32.{name}": f"module.{name}" for name in names if f"module.{name}" in checkpoint}
        sp.load(path, {"fp32": state["model"]}, include="fp32", rename=elsewhere, cast=True)
        # The masters have the values of the rounded weights now.
        objects: dict[str, Any] = {}
        optimizer = _OptimizerShard(state["optimizer"].optimizer)

        def match() -> None:
            objects.update((key, checkpoint[key]) for key in checkpoint if key in checkpoint.objects)
            optimizer.match(checkpoint)

        on_every_rank(rendezvous, operation, "match", match)
        sp.load(path, optimizer.tree, include=optimizer.include)

        def finish() -> None:
            optimizer.finish(checkpoint)
            _set_engine(state["engine"], objects)

        on_every_rank(rendezvous, operation, "finish", finish)
    own = {key: value for key, value in objects.items() if key.split(".")[0] not in _NO_CLIENT_STATE}
    return {name: _below(own, name) for name in {key.split(".")[0]: None for key in own}}


class _OptimizerShard:
    """The masters and slots of this rank, which a load fills, and the options of the groups.

    Args:
        partitioned: the optimizer, as `shardproof.frameworks.deepspeed.engine_state` describes it.
    """

    def __init__(self, partitioned: Any) -> None:
        self._partitioned = partitioned
        self._slots: dict[str, dict[str, Any]] = {}
        self._receipts: dict[str, Receipt] = {}
        self.tree: dict[str, Any] = {}
        """The state tree to load."""
        self.include: list[str] = []
        """The keys of the checkpoint to load."""

    def match(self, checkpoint: Any) -> None:
        """Allocates memory for the slots of the checkpoint."""
        masters: dict[str, Any] = {}
        stored = _slots_by_parameter(checkpoint, self._partitioned.names)
        for name, parameter in self._partitioned.names.items():
            tensors = {slot: key for slot, key in stored[name].items() if key not in checkpoint.objects}
            kinds = {
                slot: StoredSlot(getattr(torch, checkpoint.dtype(key)), tuple(checkpoint.shape(key)))
                for slot, key in tensors.items()
            }
            receipt = self._receipts[name] = self._partitioned.receive_slots(parameter, kinds)
            self._slots[name] = {
                slot: _place(receipt.tensors[slot], parameter) if slot in tensors else checkpoint[key]
                for slot, key in stored[name].items()
            }
            if MASTER in receipt.tensors:
                masters[name] = _place(receipt.tensors[MASTER], parameter)
        tree = {"fp32": masters, "optimizer": {"state": self._slots}}
        self.tree = {key: value for key, value in tree.items() if value}
        self.include = ["optimizer.state", *(f"fp32.{name}" for name in masters)]

    def finish(self, checkpoint: Any) -> None:
        """Attaches the loaded slots to the optimizer and sets the options of the groups."""
        for name, receipt in self._receipts.items():
            values = {slot: item for slot, item in self._slots[name].items() if slot not in receipt.tensors}
            receipt.attach(values, frozenset(receipt.tensors))
        _set_options(checkpoint, self._partitioned)


def _slots_by_parameter(checkpoint: Any, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Name of each parameter to its slots and their keys. A slot may have several segments."""
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for key in checkpoint:
        if key.startswith(_STATE):
            segments = key.removeprefix(_STATE).split(".")
            heads = (".".join(segments[:size]) for size in range(1, len(segments)))
            name = next((head for head in heads if head in found), None)
            if name is not None:
                found[name][key.removeprefix(f"{_STATE}{name}.")] = key
    return found


def _set_engine(engine: Any, objects: Mapping[str, Any]) -> None:
    """Sets counts, learning rate scheduler and loss scaler."""
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


def _place(item: torch.Tensor | LocalRange, parameter: torch.Tensor) -> torch.Tensor | sp.FlatShard:
    if isinstance(item, LocalRange):
        return sp.FlatShard(item.buffer, tuple(parameter.shape), item.start, item.stop)
    return item


def _set_options(checkpoint: Any, partitioned: Any) -> None:
    """Sets the options of each group to those of its parameters in the checkpoint."""
    stored: dict[str, int] = {}
    for number in itertools.count():
        if f"optimizer.param_groups.{number}.params" not in checkpoint:
            break
        stored |= dict.fromkeys(checkpoint[f"optimizer.param_groups.{number}.params"], number)
    names = {id(parameter): name for name, parameter in partitioned.names.items()}
    for group in partitioned.param_groups:
        numbers = {stored.get(names[id(parameter)]) for parameter in group["params"]} - {None}
        if len(numbers) != 1:
            continue  # the checkpoint groups these parameters differently: keep the program's options
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
