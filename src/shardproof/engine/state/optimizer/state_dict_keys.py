"""Reads the state dict of a torch optimizer as the slots and options of its parameters.

An optimizer with the key ``optim`` has the keys ``optim.<parameter>.<slot>`` and
``optim.<parameter>.@options`` in a checkpoint of a live optimizer. A state dict has other keys:

==========================================  ====================================================
``optim.state.<parameter>.<slot>``          a slot
``optim.param_groups``                      the list of groups, as one value
``optim.param_groups.<number>.<option>``    an option of a group. ``params`` lists its parameters
``optim.param_groups.<parameter>.<option>`` an option of a parameter (torch's flattened state dict)
==========================================  ====================================================

A parameter is a name, or its number in the order of the groups (`torch.optim.Optimizer.state_dict`). Sources:
``torch/optim/optimizer.py`` and ``torch/distributed/checkpoint/state_dict.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from shardproof.engine.state.optimizer.slots import EMPTY_GROUP, OPTIONS, options_of
from shardproof.engine.state.records import Catalogue
from shardproof.engine.state.visitor import join
from shardproof.errors import StructureError


@dataclass(slots=True)
class _StoredGroup:
    """A stored group."""

    options: dict[str, Any] = field(default_factory=dict)
    """Name to encoded value."""
    members: list[Any] | None = None
    """Names or numbers of its parameters; None if it lists none."""

    @staticmethod
    def of(group: Mapping[str, Any]) -> _StoredGroup:
        """A group from its encoded entries."""
        members = group.get("params")
        return _StoredGroup(options_of(group), members if isinstance(members, list) else None)


def translate_state_dict(
    catalogue: Catalogue,
    key: str,
    groups: Sequence[Sequence[Sequence[str]]],
    keys_below: Callable[[str], list[str]],
) -> tuple[Catalogue, dict[str, str], list[str]] | None:
    """Gives a stored state dict the keys of a live optimizer.

    Args:
        catalogue: the contents of the checkpoint.
        key: key of the optimizer.
        groups: for each group of the live optimizer, and each of its parameters, the names of the
            parameter. A tied parameter has several. The first is the name in a checkpoint.
        keys_below: returns the keys of the catalogue that start with a prefix.

    Returns:
        The catalogue with the new keys, the stored key of each new key of a tensor, and the keys of options
        that the checkpoint lacks. None if the catalogue has no state dict at `key`.

    Raises:
        StructureError: parameters are stored by number, and their count is not that of the live optimizer.

    >>> stored = {"state.w.exp_avg": ("float32", (2,))}
    >>> catalogue = Catalogue(stored, {}, {"param_groups": [{"lr": 0.1, "params": ["w"]}]}, 1)
    >>> below = lambda prefix: [key for key in stored if key.startswith(prefix)]
    >>> translated, stored_keys, _ = translate_state_dict(catalogue, "", [[["w"]]], below)
    >>> stored_keys, translated.objects["w.@options"]["options"]
    ({'w.exp_avg': 'state.w.exp_avg'}, {'lr': 0.1})
    """
    names = [parameter for group in groups for parameter in group]
    state_prefix, groups_key = f"{join(key, 'state')}.", join(key, "param_groups")
    slots: defaultdict[str, dict[str, str]] = defaultdict(dict)
    """Stored name of a parameter to its slots and their keys."""
    for slot_key in keys_below(state_prefix):
        name, _, slot = slot_key.removeprefix(state_prefix).rpartition(".")
        slots[name][slot] = slot_key
    option_keys = keys_below(f"{groups_key}.")
    if not slots and not option_keys and groups_key not in catalogue.objects:
        return None
    stored_groups, flat = _options(catalogue, groups_key, option_keys)
    stored_names = _stored_names(key, names, stored_groups, {*slots, *flat})
    options = _options_by_parameter(groups, stored_groups, flat, stored_names)
    stored_keys: dict[str, str] = {}
    added: dict[str, Any] = {}
    missing: list[str] = []
    used = set(stored_names)
    options_read = (
        one
        for one in option_keys
        if one not in catalogue.tensors
        and (not flat or one.removeprefix(f"{groups_key}.").rpartition(".")[0] in used)
    )
    replaced = {join(key, "state"), groups_key, *options_read}
    for parameter, stored_name, values in zip(names, stored_names, options, strict=True):
        found = slots.get(stored_name, {})
        if values is None and not found:
            continue  # reported as missing
        if values is None:
            missing.append(join(key, f"{parameter[0]}.{OPTIONS}"))
        target = join(key, parameter[0])
        tensors = {slot: name for slot, name in found.items() if name in catalogue.tensors}
        others = {slot: name for slot, name in found.items() if name not in catalogue.tensors}
        stored_keys |= {f"{target}.{slot}": name for slot, name in tensors.items()}
        replaced.update(others.values())
        added[f"{target}.{OPTIONS}"] = {
            "options": values or {},
            "slots": sorted(tensors),
            "values": {slot: catalogue.objects[name] for slot, name in others.items()},
        }
    if len(stored_groups) == len(groups):
        for number, (group, stored) in enumerate(zip(groups, stored_groups, strict=True)):
            if not group:
                added[join(key, f"{EMPTY_GROUP}{number}")] = stored.options
    return catalogue.with_keys(stored_keys, added, replaced), stored_keys, missing


def _options(
    catalogue: Catalogue, key: str, keys: Sequence[str]
) -> tuple[list[_StoredGroup], dict[str, dict[str, Any]]]:
    """The stored groups; or, of a flattened state dict, the options by name of the parameter."""
    whole = catalogue.objects.get(key)
    if isinstance(whole, list):
        groups = [_StoredGroup.of(group) for group in whole if isinstance(group, dict)]
        return groups, {}
    by_name: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for one in keys:
        name, _, option = one.removeprefix(f"{key}.").rpartition(".")
        by_name[name][option] = {"$tensor": one} if one in catalogue.tensors else catalogue.objects[one]
    numbers = sorted((name for name in by_name if name.isdigit()), key=int)
    if any("params" in by_name[name] for name in numbers) or len(numbers) == len(by_name):
        return [_StoredGroup.of(by_name[name]) for name in numbers], {}
    return [], by_name


def _stored_names(
    key: str, names: Sequence[Sequence[str]], stored: Sequence[_StoredGroup], present: Set[str]
) -> list[str]:
    """The name that the state dict has for each parameter of the live optimizer.

    `names` are those of each parameter of the live optimizer. `present` are the names or numbers of the
    parameters that have slots, or options of their own.
    """
    listed = [member for group in stored for member in group.members or ()]
    known = {*map(str, listed), *present}
    by_name = [next((name for name in parameter if name in known), parameter[0]) for parameter in names]
    are_digits = bool(present) and all(name.isdigit() for name in present)
    has_numbers = any(isinstance(member, int) for member in listed) or (
        not listed and are_digits and known.isdisjoint(by_name)
    )
    if not has_numbers:
        return by_name
    numbers = [str(member) for member in listed] or sorted(present, key=int)
    if len(numbers) != len(names) and (listed or len(numbers) > len(names)):
        raise StructureError(
            f"{join(key, 'state')} has {len(numbers)} parameters by number, and the optimizer has "
            f"{len(names)}. Give the optimizer the groups of the saved one, in the same order",
            key=key,
        )
    return numbers if listed else [str(number) for number in range(len(names))]


def _options_by_parameter(
    groups: Sequence[Sequence[Sequence[str]]],
    stored: Sequence[_StoredGroup],
    flat: Mapping[str, dict[str, Any]],
    stored_names: Sequence[str],
) -> list[dict[str, Any] | None]:
    """The encoded options of each parameter of the live optimizer; None if none are stored."""
    listed = {str(name): group.options for group in stored for name in group.members or ()}
    if listed or flat:
        known: Mapping[str, dict[str, Any]] = listed or flat
        return [known.get(name) for name in stored_names]
    if len(stored) not in (1, len(groups)):
        return [None] * len(stored_names)
    return [
        stored[number if len(stored) > 1 else 0].options for number, group in enumerate(groups) for _ in group
    ]


def optimizer_state_dicts(
    tensors: Iterable[str], objects: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """Gives the optimizers of a checkpoint the keys of a state dict, as torch's loaders expect them.

    Parameters with equal options form a group, in the order of their keys.

    Args:
        tensors: keys of the tensors.
        objects: key to plain value, decoded.

    Returns:
        The new key of each slot; the new values; and the keys of the values that they replace.

    >>> options = {"optimizer": "optim", "options": {"lr": 0.1}, "slots": ["exp_avg"], "values": {}}
    >>> optimizer_state_dicts(["optim.w.exp_avg"], {"optim.w.@options": options})[:2]
    ({'optim.w.exp_avg': 'optim.state.w.exp_avg'}, {'optim.param_groups': [{'lr': 0.1, 'params': ['w']}]})
    """
    present = set(tensors)
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    replaced: set[str] = set()
    groups: defaultdict[str, list[tuple[dict[str, Any], list[str]]]] = defaultdict(list)
    """Options and members of the groups, by key."""
    for key, data in sorted(objects.items()):
        if not _is_options(key, data):
            continue
        replaced.add(key)
        optimizer, parameter = data["optimizer"], key.removesuffix(f".{OPTIONS}")
        name = data.get("torch_name") or (parameter.removeprefix(f"{optimizer}.") if optimizer else parameter)
        state = join(optimizer, f"state.{name}")
        slots = (slot for slot in data["slots"] if f"{parameter}.{slot}" in present)
        keys |= {f"{parameter}.{slot}": f"{state}.{slot}" for slot in slots}
        values |= {f"{state}.{slot}": value for slot, value in data["values"].items()}
        of_optimizer = groups[join(optimizer, "param_groups")]
        for options, members in of_optimizer:
            if options == data["options"]:
                members.append(name)
                break
        else:
            of_optimizer.append((data["options"], [name]))
    for key, found in groups.items():
        values[key] = [{**options, "params": members} for options, members in found]
        prefix = join(key.removesuffix("param_groups").removesuffix("."), EMPTY_GROUP)
        numbers = (one.removeprefix(prefix) for one in objects if one.startswith(prefix))
        for number in sorted(map(int, filter(str.isdecimal, numbers))):
            values[key].insert(number, {**objects[f"{prefix}{number}"], "params": []})
            replaced.add(f"{prefix}{number}")
    return keys, values, replaced


def with_new_key(key: str, new_key: str, value: Any) -> Any:
    """A plain value, decoded, that moves to another key. Options of a parameter record their optimizer.

    >>> with_new_key("optim.w.@options", "adam.w.@options", {"optimizer": "optim"})
    {'optimizer': 'adam'}
    """
    if key == new_key or not _is_options(key, value):
        return value
    optimizer = value["optimizer"]
    parameter = key.removeprefix(f"{optimizer}.") if optimizer else key
    if new_key != parameter and not new_key.endswith(f".{parameter}"):
        return {name: item for name, item in value.items() if name != "optimizer"}
    return {**value, "optimizer": new_key.removesuffix(parameter).removesuffix(".")}


def _is_options(key: str, value: Any) -> bool:
    """True for the options of a parameter that record the key of their optimizer."""
    return key.endswith(f".{OPTIONS}") and isinstance(value, dict) and "optimizer" in value
