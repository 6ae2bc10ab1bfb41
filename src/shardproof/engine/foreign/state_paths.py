"""Finds the nested state dict behind keys that are joined by dots.

A key of ``torch.distributed.checkpoint`` is a path in a nested state dict, joined by dots. The names of
parameters have dots themselves, so a key alone does not determine its path. The keys of the optimizer do: a
name of a parameter occurs both as ``model.<name>`` and as ``optimizer.state.<name>.<slot>``.

Where the keys do not determine the paths, a save records them in an object. Its key has a digest of the
paths. So ranks with equal paths share one object, and ranks with other paths add theirs. The key is below
``@part``, because a load into a state without this part ignores it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import xxhash

Path = tuple[str | int, ...]
"""The steps from a state dict to a value: keys of dicts as texts, positions in lists."""

_GROUPS = re.compile(r"(?:(.*?)\.)?param_groups(?:\.(\d+)(?:\.(.+))?)?")
"""The head, the number of the group, and the name of its option."""
_PATHS_KEY = re.compile(r".+\.@part\.state_paths-[0-9a-f]{32}")


def is_paths_key(key: str) -> bool:
    """True for the key of an object that records paths."""
    return _PATHS_KEY.fullmatch(key) is not None


def paths_object(paths: Mapping[str, Path]) -> tuple[str, dict[Any, Any]] | None:
    """Key and value of the object that records the paths of some keys.

    None if the keys determine the paths, or if one path leads through the value of another.

    Example:
        >>> paths_object({"model.a.w": ("model", "a.w")})
        ('dcp.@part.state_paths-fbd217636d0655c4816734645461b009', {'model': {'a.w': None}})
        >>> paths_object({"step": ("step",)})
    """
    if state_paths(paths, ()) == paths or not _fit_together(paths.values()):
        return None
    nested: dict[Any, Any] = {}
    for path in paths.values():
        inside = nested
        for step in path[:-1]:
            inside = inside.setdefault(step, {})
        inside[path[-1]] = None
    head = "dcp"
    while head in nested:
        head += "_"
    digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(paths.values(), key=repr)))
    return f"{head}.@part.state_paths-{digest}", nested


def paths_in(nested: Mapping[Any, Any], outer: Path = ()) -> Iterator[tuple[str, Path]]:
    """The keys and paths in the value of a `paths_object`.

    Example:
        >>> dict(paths_in({"model": {"a.w": None}}))
        {'model.a.w': ('model', 'a.w')}
    """
    for step, inside in nested.items():
        path = (*outer, step)
        if isinstance(inside, dict):
            yield from paths_in(inside, path)
        else:
            yield ".".join(map(str, path)), path


def renamed_path(path: Path, key: str) -> Path | None:
    """The path of a value that got another key: the first step changes. None if other steps do.

    Example:
        >>> renamed_path(("model", "a.w"), "net.a.w"), renamed_path(("model", "a.w"), "a.w")
        (('net', 'a.w'), ('a.w',))
    """
    if key == ".".join(map(str, path)):
        return path
    rest = ".".join(map(str, path[1:]))
    if rest and (key == rest or key.endswith(f".{rest}")):
        head = key[: len(key) - len(rest)].removesuffix(".")
        return (head, *path[1:]) if head else path[1:]
    return None


def state_paths(
    tensors: Iterable[str], objects: Iterable[str], recorded: Mapping[str, Path] | None = None
) -> Mapping[str, Path]:
    """The path of each key in the nested state dict: the recorded one, or else by these rules.

    - The names of parameters that the optimizer determines are one step of the path. Other entries of the
      model are entries of the same dict.
    - The optimizer's parameter groups are a list, so their numbers are integers.
    - Any other key is one step, including its dots.

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
    paths: dict[str, Path] = {}
    for key in keys:
        model = next((one for one in prefixes if key.startswith(f"{one}.")), None)
        paths[key] = (key,) if model is None else (*_steps(model), key[len(model) + 1 :])
    for head, names in slots.items():
        if models[head] is not None or all(name.isdigit() for name in names.values()):
            for key, name in names.items():
                paths[key] = (*_steps(head), "state", name, key.rpartition(".")[2])
    paths |= _group_paths(keys)
    if not _fit_together(paths.values()):
        paths = {key: (key,) for key in keys}
    whole = paths | {key: path for key, path in (recorded or {}).items() if key in paths}
    return whole if _fit_together(whole.values()) else paths


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
