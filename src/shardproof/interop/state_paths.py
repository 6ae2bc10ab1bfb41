"""Finds the nested state dict behind keys that are joined by dots.

A key of ``torch.distributed.checkpoint`` is a path in a nested state dict, joined by dots. The names of
parameters have dots themselves, so a key alone does not determine its path. The keys of the optimizer do: a
name of a parameter occurs both as ``model.<name>`` and as ``optimizer.state.<name>.<slot>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["state_paths"]

Path = tuple[str | int, ...]

_GROUPS = re.compile(r"(?:(.*?)\.)?param_groups(?:\.(\d+)(?:\.(.+))?)?")
"""The head, the number of the group, and the name of its option."""


def state_paths(tensors: Iterable[str], objects: Iterable[str]) -> Mapping[str, Path]:
    """The path of each key in the nested state dict.

    - The names of parameters that the optimizer determines are one step of the path. Other entries of the
      model are entries of the same dict.
    - The optimizer's parameter groups are a list, so their numbers are integers.
    - Any other key is one step, including its dots.

    Args:
        tensors: keys of the tensors.
        objects: keys of the other values.

    Example:
        >>> keys = ["model.l.w", "model.l.mean", "optim.state.l.w.exp_avg"]
        >>> for path in state_paths(keys, ["optim.param_groups.0.lr", "step"]).values():
        ...     print(path)
        ('model', 'l.w')
        ('model', 'l.mean')
        ('optim', 'state', 'l.w', 'exp_avg')
        ('optim', 'param_groups', 0, 'lr')
        ('step',)
    """
    tensor_keys = dict.fromkeys(tensors)
    keys = [*tensor_keys, *objects]
    slots = _optimizer_slots(keys)
    models = {head: _model(tensor_keys, set(names.values())) for head, names in slots.items()}
    prefixes = {model for model in models.values() if model}
    paths = {key: _model_path(key, prefixes) for key in keys}
    for head, names in slots.items():
        if models[head] is not None or all(name.isdigit() for name in names.values()):
            for key, name in names.items():
                paths[key] = (*_steps(head), "state", name, key.rpartition(".")[2])
    paths |= _group_paths(keys)
    return paths if _fit_together(paths.values()) else {key: (key,) for key in keys}


def _optimizer_slots(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """By the head before ``state`` (it may be empty), the keys of slots and the parameter of each."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        head, middle, rest = f".{key}".partition(".state.")
        name, _, slot = rest.rpartition(".")
        if middle and name and slot:
            found.setdefault(head[1:], {})[key] = name
    return found


def _model(tensors: Mapping[str, None], names: set[str]) -> str | None:
    """The prefix of the names of all parameters; None if no prefix makes every name the key of a tensor."""
    some = min(names, key=len)
    prefixes = [key.removesuffix(some) for key in tensors if key == some or key.endswith(f".{some}")]
    fits = [
        prefix
        for prefix in prefixes
        if ".state." not in f".{prefix}" and all(f"{prefix}{name}" in tensors for name in names)
    ]
    return min(fits, key=len).removesuffix(".") if fits else None


def _model_path(key: str, models: Iterable[str]) -> Path:
    for model in models:
        if key.startswith(f"{model}."):
            return (*_steps(model), key[len(model) + 1 :])
    return (key,)


def _group_paths(keys: Iterable[str]) -> dict[str, Path]:
    """The paths of parameter groups whose numbers are 0, 1, 2 and so on, as those of a list."""
    found: dict[str, dict[str, Path]] = {}
    numbers: dict[str, set[int]] = {}
    for key in keys:
        match = _GROUPS.fullmatch(key)
        if match is not None:
            head, number, option = match.groups()
            rest = () if number is None else (int(number),) if option is None else (int(number), option)
            found.setdefault(head or "", {})[key] = (*_steps(head or ""), "param_groups", *rest)
            numbers.setdefault(head or "", set()).update([] if number is None else [int(number)])
    lists = [paths for head, paths in found.items() if numbers[head] == set(range(len(numbers[head])))]
    return {key: path for paths in lists for key, path in paths.items()}


def _steps(head: str) -> tuple[str, ...]:
    return tuple(head.split(".")) if head else ()


def _fit_together(paths: Iterable[Path]) -> bool:
    """True if all paths differ, and no path is a prefix of another."""
    whole = list(paths)
    inner = {path[:count] for path in whole for count in range(1, len(path))}
    return len(set(whole)) == len(whole) and inner.isdisjoint(whole)
