"""Values that belong to one rank each, such as the state of random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from shardproof._utils.accelerator import available_accelerator
from shardproof.engine.state.binder import Binder
from shardproof.engine.state.collector import Collector
from shardproof.engine.state.handlers.stateful_objects import STATEFUL, Stateful
from shardproof.engine.state.plain_decode import references
from shardproof.engine.state.tensors import torch_dtype
from shardproof.engine.state.visitor import Place, is_per_rank, join
from shardproof.errors import StructureError


class PerRank:
    """A state tree that every rank saves and restores separately.

    A load restores the value of rank ``r`` on rank ``r``. The two options apply if more or fewer ranks load
    than saved.

    Args:
        value: any state tree.
        missing: for a loading rank without a saved value: "keep" leaves the value unchanged and lists it in
            `LoadReport.unchanged`, "error" reports it as missing.
        fewer: for the saved values of ranks that do not exist in the load: "drop" ignores them and lists them
            in `LoadReport.dropped` and in a warning, "gather" puts them into `gathered` on every rank,
            "error" fails the load.

    Attributes:
        gathered: with ``fewer="gather"``, after a load: saved rank to value, for the ranks that do not exist
            in the load. It is the same on every rank. A container becomes a dict from dotted key to new
            tensors on the CPU, plain values, and the `state_dict` of objects. A save does not include it; put
            values to save into `value`.

    >>> state = {"losses": PerRank([0.5, 0.25])}
    >>> state["losses"].value
    [0.5, 0.25]
    """

    def __init__(
        self,
        value: Any,
        *,
        missing: Literal["keep", "error"] = "keep",
        fewer: Literal["drop", "gather", "error"] = "drop",
    ) -> None:
        if missing not in ("keep", "error"):
            raise ValueError(f"missing is {missing!r}, not 'keep' or 'error'")
        if fewer not in ("drop", "gather", "error"):
            raise ValueError(f"fewer is {fewer!r}, not 'drop', 'gather' or 'error'")
        self.value = value
        self.missing = missing
        self.fewer = fewer
        self.gathered: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, missing={self.missing!r}, fewer={self.fewer!r})"


def owner_of(key: str) -> tuple[str, int] | None:
    """The key of the per-rank value that a stored key belongs to, and the rank; None for other keys.

    >>> owner_of("loader.@rank-3.epoch"), owner_of("model.weight")
    (('loader', 3), None)
    """
    place, found, rest = f".{key}".partition(".@rank-")
    number = rest.partition(".")[0]
    return (place[1:], int(number)) if found and number.isdecimal() and len(number) < 19 else None


class _PerRank:
    """Handles `PerRank` and `RandomState`: the value's keys lie below ``<key>.@rank-<rank>``."""

    def collect(self, place: Place, value: PerRank | RandomState, collector: Collector) -> None:
        inner = self._inner(place, value, collector.rank)
        if isinstance(value, RandomState):
            STATEFUL.collect(inner, value, collector)
        else:
            collector.visit(inner, value.value)

    def bind(self, place: Place, value: PerRank | RandomState, binder: Binder) -> None:
        inner = self._inner(place, value, binder.rank)
        stored = binder.keys_below(join(place.key, "@rank-"))
        binder.binding.used.update(stored)
        if not stored:
            if binder.selected(place.key):
                binder.binding.missing.append(place.key)
            return
        binder.binding.own[place.key] = False
        if isinstance(value, PerRank) and value.fewer != "drop":
            self._bind_others(place, value, stored, binder)
        if binder.rank >= binder.catalogue.world_size:
            if binder.selected(inner.key):
                (binder.binding.missing if value.missing == "error" else binder.binding.unchanged).append(
                    inner.key
                )
        elif isinstance(value, RandomState):
            STATEFUL.bind(inner, value, binder)
        else:
            binder.visit(inner, value.value)

    @staticmethod
    def _bind_others(place: Place, value: PerRank, stored: Sequence[str], binder: Binder) -> None:
        """Binds the values of saved ranks that do not exist in the load."""
        others: dict[int, list[str]] = {}
        for key in filter(binder.selected, stored):
            owner = owner_of(key)
            if owner is not None and owner[1] >= binder.world_size:
                others.setdefault(owner[1], []).append(key)
        if value.fewer == "error":
            for rank in sorted(others):
                binder.mismatch(
                    join(place.key, f"@rank-{rank}"),
                    f"values of at most {binder.world_size} ranks, the number that load",
                    f"the value of rank {rank}; use PerRank(fewer='gather') or PerRank(fewer='drop') to load",
                )
            return
        binder.binding.own[place.key] = True
        values = {
            rank: _stored_value(join(place.key, f"@rank-{rank}"), keys, binder)
            for rank, keys in sorted(others.items())
        }
        binder.on_finish(
            lambda: setattr(value, "gathered", {rank: build() for rank, build in values.items()})
        )

    @staticmethod
    def _inner(place: Place, value: PerRank | RandomState, rank: int) -> Place:
        if is_per_rank(place.key):
            raise StructureError(
                f"{place.path} is a per-rank value inside a per-rank value. Use one PerRank", key=place.key
            )
        return Place(join(place.key, f"@rank-{rank}"), place.path, partial(setattr, value, "value"))


def _stored_value(name: str, keys: Sequence[str], binder: Binder) -> Callable[[], Any]:
    """Returns a function that builds one rank's value for `PerRank.gathered`, after all tensors are read."""
    objects = {key: binder.catalogue.objects[key] for key in keys if key in binder.catalogue.objects}
    referenced = {tensor for data in objects.values() for tensor, _ in references(data)}
    values = {key: binder.rebuild(key, data) for key, data in objects.items()}
    for key in keys:
        if key not in values and key not in referenced:
            dtype, shape = binder.catalogue.tensors[key]
            values[key] = partial(_same, binder.fresh(key, torch_dtype(dtype), tuple(shape), None))
    if name in values:
        return values[name]
    return lambda: {key.removeprefix(f"{name}."): values[key]() for key in sorted(values)}


def _same(value: Any) -> Any:
    return value


PER_RANK = _PerRank()


class RandomState:
    """The global random generators of this process: Python's, numpy's, torch's on CPU and accelerator.

    Each rank stores and restores its own generators. A load on more ranks than saved leaves those of the
    additional ranks unchanged, or fails with ``missing="error"``. A load on fewer ranks drops the other
    states: `LoadReport.dropped` and a warning name them.

    Args:
        missing: for a rank that did not save: "keep" leaves its generators unchanged, "error" reports the key
            as missing.

    >>> rng = RandomState()
    >>> state = rng.state_dict()
    >>> before = torch.rand(1)
    >>> rng.load_state_dict(state)
    >>> bool(torch.rand(1) == before)
    True
    """

    def __init__(self, *, missing: Literal["keep", "error"] = "keep") -> None:
        self.missing = missing

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators. It does not change."""
        module, accelerator = _accelerator(), None
        if module is not None and hasattr(module, "device_count"):
            devices = [module.get_rng_state(index) for index in range(module.device_count())]
            accelerator = {"current": module.current_device(), "devices": devices}
        elif module is not None:
            accelerator = {"current": 0, "devices": [module.get_rng_state()]}
        return {
            "python": _python_state(random),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "accelerator": accelerator,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators to a state that `state_dict` returned."""
        _set_python_state(random, state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        _set_accelerator_state(state["accelerator"])


def _python_state(generator: Any) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def _set_python_state(generator: Any, state: dict[str, Any]) -> None:
    generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def _accelerator() -> Any:
    """The device module of the accelerator; None if there is none or the process has not used it."""
    device = available_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return None
    # Reading the generator would initialise a device that the process does not use.
    return module if getattr(module, "is_initialized", lambda: True)() else None


def _set_accelerator_state(state: dict[str, Any] | None) -> None:
    """Sets each device's generator. The current device gets the state of the saved rank's current device."""
    module = _accelerator()
    if module is None or state is None:
        return
    if not hasattr(module, "device_count"):
        module.set_rng_state(state["devices"][state["current"]].cpu())
        return
    for index, stored in enumerate(state["devices"][: module.device_count()]):
        module.set_rng_state(stored.cpu(), index)
    module.set_rng_state(state["devices"][state["current"]].cpu(), module.current_device())


GENERATOR = Stateful(
    lambda generator: generator.get_state(), lambda generator, state: generator.set_state(state.cpu())
)
NUMPY_GENERATOR = Stateful(
    lambda generator: generator.bit_generator.state,
    lambda generator, state: setattr(generator.bit_generator, "state", state),
)
NUMPY_RANDOM_STATE = Stateful(
    lambda generator: generator.get_state(legacy=False),
    lambda generator, state: generator.set_state(state),
)
PYTHON_GENERATOR = Stateful(_python_state, _set_python_state)
