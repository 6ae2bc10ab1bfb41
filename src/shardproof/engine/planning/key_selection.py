"""Patterns that select keys, and tables that rename them, in loads, conversions and comparisons."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from shardproof._utils.humanize import nearest
from shardproof.errors import StructureError

Patterns = str | Sequence[str] | None
Cast = bool | str | Sequence[str]

_PAIRS_SHOWN = 8
_NAMES_LOOKED_UP = 3
"""Maximum number of names for which an error searches for similar keys. One search takes seconds among
100,000 keys."""


def selects(include: Patterns, exclude: Patterns) -> Callable[[str], bool]:
    """Returns a predicate.

    It is True for a key that matches a pattern of `include` (None: any key) and no pattern of `exclude`.
    Patterns are those of `fnmatch`, over the whole key; a pattern also takes all keys below it.

    >>> selected = selects("model", "*.bias")
    >>> [selected(key) for key in ("model.w", "model.bias", "optimizer.w.exp_avg")]
    [True, False, False]
    """
    included, excluded = _as_tuple(include), _as_tuple(exclude)
    if include is None and not excluded:
        return lambda key: True

    def selected(key: str) -> bool:
        return (include is None or _matches(key, included)) and not _matches(key, excluded)

    return selected


def casts(cast: Cast) -> Callable[[str], bool]:
    """Returns a predicate: True if the values of a key may be converted to the dtype of their destination."""
    if isinstance(cast, bool):
        return lambda key: cast
    patterns = _as_tuple(cast)
    return lambda key: _matches(key, patterns)


def check_patterns(option: str, patterns: Patterns, keys: Sequence[str]) -> None:
    """Refuses a pattern of an option that matches no key: a typo would load nothing and report success.

    Raises:
        StructureError: a pattern matches no key.
    """
    unused = unused_patterns(patterns, keys)
    if unused:
        raise no_match(option, unused, keys)


def unused_patterns(patterns: Patterns, keys: Collection[str]) -> list[str]:
    """The patterns that match no key.

    >>> unused_patterns(["model", "optimiser"], ["model.w", "optimizer.w.exp_avg"])
    ['optimiser']
    """
    return [item for item in _as_tuple(patterns) if not any(_matches(key, (item,)) for key in keys)]


def no_match(option: str, unused: Sequence[str], keys: Sequence[str]) -> StructureError:
    """The error of patterns of an option that match no key; the keys are for the advice."""
    return StructureError(f"{option}: no key matches {list(unused)}{_advice(unused, keys)}")


def unused_renames(rename: Mapping[str, str] | None, keys: Collection[str]) -> dict[str, str]:
    """The entries of a rename with a target key that neither is nor is above a key of the target.

    >>> unused_renames({"model": "net", "typo": "w", "": "head"}, ["model.0.weight"])
    {'typo': 'w'}
    """
    above = {key[:at] for key in keys for at, letter in enumerate(f"{key}.") if letter == "."}
    return {new: stored for new, stored in (rename or {}).items() if new and new not in above}


def rename_keys(keys: Iterable[str], rename: Mapping[str, str], *, stored_first: bool) -> dict[str, str]:
    """Returns the new name of each stored key.

    If several entries of `rename` equal the key or are above it, the longest one applies.

    Args:
        keys: the stored keys.
        rename: stored key to new key, or new key to stored key; each stands for all keys below it too. An
            empty new key removes the prefix.
        stored_first: True for stored key to new key, as in a conversion. False if `rename` says from where a
            new key comes, as in a load. The result then lacks the stored keys that no entry renames, and
            that have such a new key or are below it. An empty new key displaces only keys of equal names.

    Raises:
        StructureError: a stored key of `rename` matches no key, its direction is reversed, or two keys get
            one name.

    >>> rename_keys(["net.w", "epoch"], {"net": "model"}, stored_first=True)
    {'net.w': 'model.w', 'epoch': 'epoch'}
    >>> rename_keys(["model.w", "ema.w", "epoch"], {"model": "ema"}, stored_first=False)
    {'ema.w': 'model.w', 'epoch': 'epoch'}
    """
    pairs = [pair if stored_first else pair[::-1] for pair in rename.items()]
    new_names, unused, names = dict(pairs), {stored for stored, _ in pairs}, {}
    kept = []
    for key in keys:
        names[key], entry = _new_name(key, new_names)
        if entry is None:
            kept.append(key)
        else:
            unused.discard(entry)
        if not names[key]:
            raise StructureError(f"rename: {key!r} would have an empty name", key=key)
    if unused:
        raise _no_key(sorted(unused), list(names), rename, stored_first)
    for stored, new in pairs:
        if new_names[stored] != new:
            raise StructureError(
                f"rename: both {new!r} and {new_names[stored]!r} would be {stored!r} of the checkpoint",
                key=stored,
            )
    if not stored_first:
        given = {new: new for _, new in pairs if new}
        taken = {names[key] for key in names.keys() - kept}
        for key in kept:
            if key in taken or _new_name(key, given)[1] is not None:
                del names[key]
    stored_of: dict[str, str] = {}
    for key, name in names.items():
        if stored_of.setdefault(name, key) != key:
            raise StructureError(
                f"rename: {stored_of[name]!r} and {key!r} of the checkpoint would both be {name!r}", key=name
            )
    return names


def _new_name(key: str, new_names: Mapping[str, str]) -> tuple[str, str | None]:
    """The new name of a stored key, and the entry of `new_names` that gives it; None if none applies."""
    head, tail = key, ""
    while head not in new_names and "." in head:
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    if head not in new_names:
        return key, None
    return (new_names[head] + tail).removeprefix("."), head


def stored_name(key: str, rename: Mapping[str, str], stored_keys: Collection[str]) -> str:
    """The stored key that `rename_keys` gives the name `key`, or would give it if it was stored.

    Args:
        key: a new name.
        rename: stored key to new key, as in a conversion. The longest new key that applies decides.
        stored_keys: the stored keys. One that keeps its name stands for itself.

    >>> [stored_name(key, {"model": "", "model.head": "top"}, {"lr"}) for key in ("0.w", "top.w", "lr")]
    ['model.0.w', 'model.head.w', 'lr']
    >>> stored_name("net.w", {"model": "net2"}, {"model.w"})
    'net.w'
    """
    if key in stored_keys and _new_name(key, rename)[0] == key:
        return key
    above = [(new, stored) for stored, new in rename.items() if not new or f"{key}.".startswith(f"{new}.")]
    if not above:
        return key
    new, stored = max(above, key=lambda pair: len(pair[0]))
    return f"{stored}.{key}" if not new else stored + key[len(new) :]


def _no_key(
    unused: list[str], keys: Sequence[str], rename: Mapping[str, str], stored_first: bool
) -> StructureError:
    """The error of a rename with stored keys that match no key."""
    left, right = list(rename), list(rename.values())
    stored, new = (left, right) if stored_first else (right, left)
    known = [key for key in dict.fromkeys(new) if any(f"{other}.".startswith(f"{key}.") for other in keys)]
    if not known and unused == [""] and not stored_first:
        return StructureError(
            f"rename: the stored key of {new!r} is empty. If the keys of the checkpoint have no prefix, the "
            "target is the module or dict itself, as in sp.load(path, model)",
            keys=unused,
        )
    if not known or len(unused) < len(set(stored)):
        return StructureError(f"rename: no key matches {unused}{_advice(unused, keys)}", keys=unused)
    direction = (
        "of a conversion maps a stored key to the key that is written"
        if stored_first
        else "of a load maps a key of the target to the stored key"
    )
    swapped = dict(zip(right, left, strict=True))
    shown = f": {dict(list(swapped.items())[:_PAIRS_SHOWN])}" if len(swapped) == len(rename) else ""
    if shown and len(swapped) > _PAIRS_SHOWN:
        shown = f"{shown[:-1]}, ...}}"
    return StructureError(
        f"rename: the direction is reversed: rename {direction}, and the checkpoint has "
        f"{known[:_PAIRS_SHOWN]} and no {unused[:_PAIRS_SHOWN]}. Swap both sides{shown}",
        keys=unused,
    )


def _advice(names: Sequence[str], keys: Sequence[str]) -> str:
    """Advice for names that match no key, as the end of a sentence."""
    near = dict.fromkeys(key for name in names[:_NAMES_LOOKED_UP] for key in nearest(name, keys))
    return (f"; near it: {', '.join(near)}" if near else "") + (
        "; `shardproof inspect` lists the keys of the checkpoint"
    )


def _as_tuple(patterns: Patterns) -> tuple[str, ...]:
    if patterns is None:
        return ()
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, item) or fnmatch.fnmatchcase(key, f"{item}.*") for item in patterns)
