"""Objects with a ``state_tree`` (parts), and objects that return and restore their state as a value.

A part is optional in a checkpoint. The other objects are schedulers, data loaders and generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardproof.engine.state.binder import MISSING, Binder
from shardproof.engine.state.collector import Collector
from shardproof.engine.state.handlers.nested_states import NestedState, UndeterminedError
from shardproof.engine.state.plain_decode import decode, references
from shardproof.engine.state.visitor import Place, is_per_rank, join
from shardproof.errors import StructureError

SEGMENT = "@part"
"""The segment that the keys of a part's values have after the key of the part."""
_OF_DEEPSPEED = "deepspeed.runtime.base_optimizer", "ZeROOptimizer"
"""The module and the name of the class that all ZeRO optimizers of DeepSpeed derive from."""


class _Part:
    """Handles values with a method ``state_tree``: its keys lie below ``<key>.@part``.

    ``state_tree()`` returns a dict, a state tree to save or to fill. A part is optional: a checkpoint without
    it does not change it, and a checkpoint with it loads into a state without it. A load restores a whole
    part or nothing of it. It calls these methods, if the type has them:

    - ``check_stored(stored)`` before the load overwrites anything. `stored` maps each key below the part to
      its plain data, or to None for tensors and plain data that refers to tensors. It omits per-rank values,
      so that all ranks decide the same. The method raises StructureError to fail the load, or returns False
      to leave the whole part unchanged. It must not change anything: the load may still fail, and the program
      may then load another checkpoint.
    - ``state_loaded()`` after the whole part is set.
    """

    def collect(self, place: Place, value: Any, collector: Collector) -> None:
        collector.visit(_inner(place), _tree_of(place, value))

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        """Binds the tree if the checkpoint has one and the value accepts it."""
        inner = _inner(place)
        stored = binder.keys_below(f"{inner.key}.")
        selected = [key for key in stored if binder.selected(key)]
        if not binder.selected(inner.key) and not selected:
            return
        if stored and len(selected) < len(stored):
            raise StructureError(
                f"{place.path} can only be loaded whole, but include and exclude select {len(selected)} of "
                f"its {len(stored)} keys. Include or exclude {place.key!r}",
                key=place.key,
            )
        if not stored:
            binder.binding.unchanged.append(inner.key)
            return
        binder.binding.parts.add(inner.key)
        if not _accepts(value, f"{inner.key}.", stored, binder):
            binder.binding.used.update(stored)
            binder.binding.unchanged.append(inner.key)
            binder.binding.declined.append(inner.key)
            return
        binder.visit(inner, _tree_of(place, value))
        loaded = getattr(value, "state_loaded", None)
        if loaded is not None:
            # Optimizers of the part bind at the end of the walk. This call must come after theirs.
            binder.later.append(lambda: binder.on_finish(loaded))


def _inner(place: Place) -> Place:
    return Place(join(place.key, SEGMENT), f"{place.path}.state_tree()")


def _tree_of(place: Place, value: Any) -> dict[Any, Any]:
    tree = value.state_tree()
    if not isinstance(tree, dict) or not tree:
        raise StructureError(
            f"{place.path}.state_tree() must return a dict with at least one item, found {tree!r:.80}",
            key=place.key,
        )
    return tree


def _accepts(value: Any, prefix: str, stored: list[str], binder: Binder) -> bool:
    """True unless the value's `check_stored` rejects the stored part."""
    check = getattr(value, "check_stored", None)
    if check is None:
        return True
    below = {key.removeprefix(prefix): key for key in stored}
    plain: dict[str, Any] = {}
    """None for a tensor, and for plain data that refers to one."""
    try:
        for name, key in below.items():
            if not is_per_rank(name):
                data = binder.catalogue.objects.get(key)
                plain[name] = None if any(references(data)) else decode(data, path=key)
        accepted = check(plain)
    except StructureError as error:
        binder.binding.refused.append(error)
        return False
    return accepted is not False


def has_state_tree(value: Any) -> bool:
    """True if the value's type has `state_tree`."""
    return callable(getattr(type(value), "state_tree", None))


def parts_of(key: str) -> list[str]:
    """The parts that a key belongs to, outermost first. The last segment of a key is never a part.

    >>> parts_of("rerun.@part.own.@rank-1"), parts_of("model.weight"), parts_of("model.@part")
    (['rerun.@part'], [], [])
    """
    segments = key.split(".")
    return [".".join(segments[: at + 1]) for at, segment in enumerate(segments[:-1]) if segment == SEGMENT]


PART = _Part()


@dataclass(frozen=True, slots=True)
class Stateful:
    """Handles values by two functions that read and set their state."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]

    def collect(self, place: Place, value: Any, collector: Collector) -> None:
        """Adds the whole state as one object."""
        collector.object(place.key, self.read(value), place.path)

    def bind(self, place: Place, value: Any, binder: Binder) -> None:
        """Decodes the stored state and sets it after all tensors are read."""
        if self._bind_nested(place, value, binder):
            return
        data = binder.object(place.key)
        if data is not MISSING:
            rebuilt = binder.rebuild(place.key, data, lambda: self.read(value))
            binder.on_finish(lambda: self._restore(place, value, rebuilt()))

    def _bind_nested(self, place: Place, value: Any, binder: Binder) -> bool:
        """Binds a state that is stored under keys below that of the object. False if it is not."""
        key, catalogue = place.key, binder.catalogue
        if key in catalogue.objects or key in catalogue.tensors:
            return False
        below = binder.selected_below(key)
        if not below or below[0].startswith(f"{key}.@"):
            return False
        present = self.read(value)
        if not isinstance(present, Mapping):
            return False
        try:
            rebuilt = NestedState(key, present, binder).bind()
        except UndeterminedError as error:
            advice = (
                f"neither the checkpoint nor the present state of the object tells how {error} is nested. "
                "Load a nested dict with these keys in the place of the object, and give it to "
                "load_state_dict. Or exclude the key"
            )
            if not binder.note_below(key, "the state of the object", below, advice):
                binder.binding.missing.append(key)
        else:
            binder.on_finish(lambda: self._restore(place, value, rebuilt()))
        return True

    def _restore(self, place: Place, value: Any, state: Any) -> None:
        try:
            self.write(value, state)
        except Exception as error:  # of the program's class: its type stays, and the note names the object
            error.add_note(f"raised by the {type(value).__qualname__} at {place.path}, key {place.key!r}")
            raise


STATEFUL = Stateful(lambda value: value.state_dict(), lambda value, state: value.load_state_dict(state))


def is_stateful(value: Any) -> bool:
    """True if the value's type has `state_dict` and `load_state_dict`."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def refuse_divided(value: Any, place: Place) -> None:
    """Raises for an object whose ``state_dict`` has no or only a part of what the ranks divide.

    The optimizers of Megatron-Core have a ``sharded_state_dict``. Their ``state_dict`` lacks main weights and
    moments. That of a ZeRO optimizer of DeepSpeed has the flat partitions of one rank.

    Raises:
        StructureError: the value is such an object.
    """
    kind = type(value)
    if callable(getattr(kind, "sharded_state_dict", None)):
        lacks = "state_dict() lacks that part"
        remedy = (
            "With Megatron-Core, save `live_state(model, optimizer)` by `save` of "
            "shardproof.frameworks.megatron_core. With Megatron-FSDP, use "
            "shardproof.frameworks.megatron_fsdp.optimizer_state(optimizer, model) in its place"
        )
    elif any((base.__module__, base.__qualname__) == _OF_DEEPSPEED for base in kind.__mro__):
        lacks = "state_dict() has the part of one rank"
        remedy = (
            "Save `engine_state(engine)` of shardproof.frameworks.deepspeed, which has the model and the "
            "optimizer, or call its `save_checkpoint(engine, folder)`"
        )
    else:
        return
    raise StructureError(
        f"{place.path} is a {kind.__module__}.{kind.__qualname__}, which divides its state among the ranks: "
        f"{lacks}. {remedy}",
        key=place.key,
    )
