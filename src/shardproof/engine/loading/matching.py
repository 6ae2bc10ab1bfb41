"""Matches a state with a checkpoint, before a load changes anything: finds destinations and mismatches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from shardproof._utils.arguments import check_boolean, check_mapping, check_texts
from shardproof._utils.mappings import LazyMapping
from shardproof.engine.foreign import renamed_path
from shardproof.engine.loading.checkpoint import Checkpoint
from shardproof.engine.loading.destinations import Destination
from shardproof.engine.planning import (
    Cast,
    Patterns,
    ReadPlan,
    RequestedBoxes,
    casts,
    check_patterns,
    no_match,
    plan_reads,
    rename_keys,
    selects,
    unused_patterns,
    unused_renames,
)
from shardproof.engine.state import Binding, Catalogue, TensorEntry, bind, owner_of, parts_of
from shardproof.errors import KeyMismatchError, StorageError, StructureError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_log = logging.getLogger("shardproof")
_FEW = 4
"""A load without `strict` warns if it fills less than this part of the target's keys, and as little of the
checkpoint's."""

_Keys: TypeAlias = tuple[str, ...]
_Mismatch: TypeAlias = tuple[str, str, str]
"""A key, the target's value and the checkpoint's."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of a load; see `shardproof.load`."""

    strict: bool = True
    include: Patterns = None
    exclude: Patterns = None
    cast: Cast = False
    rename: Mapping[str, str] | None = None
    read_once: bool = False
    group: ProcessGroup | None = None
    format: str | None = None
    trust_pickle: bool = False

    def __post_init__(self) -> None:
        check_boolean("strict", self.strict)
        check_boolean("read_once", self.read_once)
        check_boolean("trust_pickle", self.trust_pickle)
        for option, patterns in (("include", self.include), ("exclude", self.exclude)):
            check_texts(option, patterns, "a pattern, a list of patterns or None")
        if self.cast is None or not isinstance(self.cast, bool):
            check_texts("cast", self.cast, "True, False, a pattern or a list of patterns")
        check_mapping("rename", self.rename, "a dict of key to key, or None", texts=True)


DEFAULTS = LoadOptions()


class MatchReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of one rank, after it has matched its target with the checkpoint."""

    attempt: str
    strict: bool
    read_once: bool
    missing: tuple[str, ...] = ()
    """Keys of this rank's target that the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that this rank's target does not request, those of absent parts left out."""
    mismatched: tuple[_Mismatch, ...] = ()
    of_absent_parts: tuple[str, ...] = ()
    """Keys of the checkpoint in optional parts that this rank's target lacks."""
    declined: tuple[str, ...] = ()
    """Parts of the target that declined the stored state."""
    per_rank: tuple[str, ...] = ()
    """Keys of the per-rank values that the checkpoint and this rank's target both have."""
    gathered: tuple[str, ...] = ()
    """The keys in `per_rank` for which this rank gathers the values of ranks that do not load."""
    unused_excludes: tuple[str, ...] = ()
    """Patterns of `exclude` that match no key of this rank's target or of the checkpoint."""
    unused_renames: dict[str, str] | None = None
    """Entries of `rename` whose key this rank's target does not have; None without `rename`."""
    found: int = 0
    """Number of keys of this rank's target that the checkpoint has."""
    adapted: tuple[str, ...] = ()
    """Keys of the checkpoint that only load hooks of this rank's target get."""
    excludes_all: bool | None = None
    """True if `exclude` leaves no key of this rank's target; None without `exclude` or without keys."""
    narrowed: tuple[str, ...] = ()
    """Keys whose cast may change a number, each with both dtypes; see `_is_narrower`."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The destinations and the read plan of one rank."""

    report: MatchReport
    binding: Binding
    destinations: list[Destination]
    plan: ReadPlan | None
    """None after a mismatch, because then no rank reads."""


def match(
    checkpoint: Checkpoint,
    state: Any,
    options: LoadOptions,
    rank: int,
    world_size: int,
    ranks: Sequence[int] | None = None,
) -> Matched:
    """Binds a state to a checkpoint and plans the reads. It does not change the state.

    It checks the files of the load. Without `include` and `exclude`, rank 0 checks all files first. With
    them, rank 0 checks the files of all selected keys that it knows, and the other ranks those that it may
    not know. These are the keys of an optimizer of another rank, and the tensors inside of plain values.

    Raises:
        StorageError: a file is missing or has another size.
        StructureError: a value of the target cannot be loaded, or a pattern or a rename matches no key.
        TilingError: the stored chunks of a wanted tensor do not tile it.
    """
    if options.include is not None and not list(options.include):
        raise StructureError(
            "include: it is empty, so that the load would fill nothing. Pass None for all keys"
        )
    is_selective = options.include is not None or bool(options.exclude)
    if rank == 0 and not is_selective:
        checkpoint.check_files()
    catalogue, stored_names = renamed(checkpoint.catalogue(), options.rename)
    selected = selects(options.include, options.exclude)
    requested: set[str] = set()
    """Keys that the target requests, selected or not; found only for the checks of `exclude` and `rename`."""

    def remember(key: str) -> bool:
        requested.add(key)
        return selected(key)

    binding = bind(
        state,
        catalogue,
        rank=rank,
        world_size=world_size,
        ranks=ranks,
        selected=remember if options.exclude or options.rename else selected,
        strict=options.strict,
    )
    _check_selection(options, binding)
    entries, mismatched, narrowed = _of_loadable_dtypes(binding, casts(options.cast))

    def rows_of(keys: Iterable[str]) -> list[int]:
        names = [binding.stored_keys.get(key, key) for key in keys]
        return checkpoint.rows([stored_names.get(name, name) for name in names])

    if is_selective:
        needed = set(filter(selected, binding.catalogue.tensors)) if rank == 0 else set()
        needed |= {key for entry in entries if (key := entry.key) in binding.stored_keys or not selected(key)}
        checkpoint.check_files(np.flatnonzero(np.isin(checkpoint.table.tensor, rows_of(needed))))
    rows = rows_of(entry.key for entry in entries)
    entries, rows, differing = _without_tied(checkpoint, entries, rows)
    mismatched += differing
    report = _report(checkpoint, binding, options, mismatched, requested)
    report = msgspec.structs.replace(report, narrowed=tuple(narrowed))
    if binding.refused or mismatched or (options.strict and binding.missing):
        return Matched(report, binding, [], None)
    return Matched(report, binding, *_planned(checkpoint, entries, rows))


def _check_selection(options: LoadOptions, binding: Binding) -> None:
    """Raises StructureError for a pattern of `include` or `cast` that matches no key of either side."""
    for option, patterns in (("include", options.include), ("cast", options.cast)):
        if patterns is not None and not isinstance(patterns, bool):
            catalogue = binding.catalogue
            known = (*catalogue.tensors, *catalogue.objects, *binding.missing, *binding.unchanged)
            check_patterns(option, patterns, known)


def _of_loadable_dtypes(
    binding: Binding, may_cast: Callable[[str], bool]
) -> tuple[list[TensorEntry], list[_Mismatch], list[str]]:
    """The destinations that the load can fill, all mismatches, and the keys in `MatchReport.narrowed`."""
    mismatched = [(item.key, item.expected, item.found) for item in binding.mismatched]
    if not binding.converts:
        return binding.tensors, mismatched, []
    entries: list[TensorEntry] = []
    narrowed: list[str] = []
    for entry in binding.tensors:
        dtype = binding.catalogue.tensors[entry.key][0]
        loses_part = dtype.startswith("complex") and not entry.dtype.startswith("complex")
        if entry.dtype == dtype or (not loses_part and may_cast(entry.key)):
            entries.append(entry)
            if _is_narrower(entry.dtype, dtype):
                narrowed.append(f"{entry.key} ({dtype} to {entry.dtype})")
        else:
            advice = "a cast would drop the imaginary part" if loses_part else "cast=True converts"
            mismatched.append((entry.key, entry.dtype, f"{dtype} ({advice})"))
    return entries, mismatched, narrowed


def _is_narrower(dtype: str, stored: str) -> bool:
    """True for a dtype of integers or booleans that cannot hold every number of the stored dtype.

    >>> _is_narrower("int16", "float32"), _is_narrower("int64", "uint8"), _is_narrower("float16", "float32")
    (True, False, False)
    """
    whole = ("int", "uint", "bool")
    return dtype.startswith(whole) and not (stored.startswith(whole) and np.can_cast(stored, dtype))


def _without_tied(
    checkpoint: Checkpoint, entries: list[TensorEntry], rows: list[int]
) -> tuple[list[TensorEntry], list[int], list[_Mismatch]]:
    """The destinations without those that are tied to another one, which need no read of their own.

    Returns:
        The destinations that are left, their rows, and the tied ones whose stored tensors differ.
    """
    # Empty shards that are views of one buffer look like tied tensors. They need no read.
    tied = [(entry.key, entry.alias_of) for entry in entries if entry.alias_of and entry.pieces]
    if not tied:
        return entries, rows, []
    row_of = {entry.key: row for entry, row in zip(entries, rows, strict=True)}
    found = "two tensors in the checkpoint whose chunks differ (exclude one of them)"
    differing = [
        (key, f"one tensor with {other!r}", found)
        for key, other in tied
        if other in row_of and not _same_chunks(checkpoint, row_of[key], row_of[other])
    ]
    left = [entry for entry in entries if entry.alias_of not in row_of]
    return left, [row_of[entry.key] for entry in left], differing


def _report(
    checkpoint: Checkpoint,
    binding: Binding,
    options: LoadOptions,
    mismatched: Sequence[_Mismatch],
    requested: set[str],
) -> MatchReport:
    """This rank's report of its matches."""
    catalogue = binding.catalogue
    unexpected, of_absent_parts = _unrequested(checkpoint, binding, options)
    unused_excludes: list[str] = []
    if options.exclude:
        known = (*catalogue.tensors, *catalogue.objects, *requested)
        unused_excludes = unused_patterns(options.exclude, known)
    return MatchReport(
        checkpoint.attempt,
        options.strict,
        options.read_once,
        tuple(binding.missing),
        tuple(unexpected),
        tuple(mismatched),
        tuple(of_absent_parts),
        tuple(sorted(binding.declined)),
        tuple(binding.own),
        tuple(binding.gathered),
        tuple(unused_excludes),
        unused_renames(options.rename, requested | binding.used) if options.rename else None,
        sum(key in catalogue.tensors or key in catalogue.objects for key in binding.used),
        tuple(sorted(binding.adapted)),
        not any(map(selects(options.include, options.exclude), requested))
        if options.exclude and requested
        else None,
    )


def _unwrapping(missing: Sequence[str], unexpected: Sequence[str]) -> dict[str, str]:
    """A rename that fits all missing keys to unexpected ones with the prefix ``module``; empty if none does.

    >>> _unwrapping(["net.0.w", "net.0.b"], ["net.module.0.b", "net.module.0.w"])
    {'net': 'net.module'}
    """
    steps = missing[0].split(".") if missing else []
    for head in (".".join(steps[:count]) for count in range(len(steps))):
        below = f"{head}." if head else ""
        rest = [key.removeprefix(below) for key in missing if key.startswith(below)]
        for stored in (f"{below}module", "module"):
            if len(rest) == len(missing) and {f"{stored}.{name}" for name in rest} <= {*unexpected}:
                return {head: stored}
    return {}


def _unrequested(
    checkpoint: Checkpoint, binding: Binding, options: LoadOptions
) -> tuple[list[str], list[str]]:
    """Selected keys of the checkpoint that the target does not request, sorted.

    Returns the unexpected keys, and those of optional parts that the target lacks.
    """
    catalogue = binding.catalogue
    used = binding.used if options.strict else binding.used - binding.adapted
    unused = (catalogue.tensors.keys() - used) | (catalogue.objects.keys() - used)
    unused -= checkpoint.inner_tensors(catalogue.objects, unused - catalogue.objects.keys())
    unexpected: list[str] = []
    of_absent_parts: list[str] = []
    for key in sorted(filter(selects(options.include, options.exclude), unused)):
        is_expected_part = binding.parts.issuperset(parts_of(key))
        (unexpected if is_expected_part else of_absent_parts).append(key)
    return unexpected, of_absent_parts


def _same_chunks(checkpoint: Checkpoint, row: int, other: int) -> bool:
    """True if two stored tensors have the same boxes and digests, chunk by chunk."""
    if row == other:
        return True
    table = checkpoint.table

    def chunks_of(tensor: int) -> list[Any]:
        rows = np.flatnonzero(table.tensor == tensor).tolist()
        spans = [slice(table.box_start[at], table.box_start[at + 1]) for at in rows]
        boxes = [(table.box_offsets[span].tolist(), table.box_sizes[span].tolist()) for span in spans]
        return sorted(zip(boxes, table.digest[rows].tolist(), strict=True))

    return chunks_of(row) == chunks_of(other)


def _planned(
    checkpoint: Checkpoint, entries: Sequence[TensorEntry], rows: Sequence[int]
) -> tuple[list[Destination], ReadPlan]:
    destinations = [
        Destination(entry.key, entry.dtype, piece.view, piece.address, piece.is_plain)
        for entry in entries
        for piece in entry.pieces
    ]
    pieces = [piece for entry in entries for piece in entry.pieces]
    plan = plan_reads(
        checkpoint.tensors,
        checkpoint.table,
        RequestedBoxes(
            np.repeat(np.array(rows, np.int64), [len(entry.pieces) for entry in entries]),
            np.fromiter(chain.from_iterable([piece.offsets for piece in pieces]), np.int64),
            np.fromiter(chain.from_iterable([piece.sizes for piece in pieces]), np.int64),
        ),
        advice=checkpoint.tiling_advice,
    )
    return destinations, plan


class AgreedKeys(msgspec.Struct, frozen=True, array_like=True):
    """The keys that do not fit, and that the load accepts. Equal on all ranks."""

    missing: _Keys
    """Keys of the targets that the checkpoint lacks."""
    unexpected: _Keys
    """Keys of the checkpoint that no rank requests."""
    dropped: _Keys
    """Per-rank values of the checkpoint that no rank loads."""
    only_adapted: _Keys
    """Keys of the checkpoint that load hooks of some ranks get, and that belong to no rank's target."""


def agree(location: str, reports: Sequence[MatchReport], stored: Callable[[], Iterable[str]]) -> AgreedKeys:
    """Coordinator: checks that all ranks see one checkpoint, and that its keys fit their targets.

    `stored` returns the selected keys of the checkpoint. It is called only for some checks.

    Raises:
        StructureError: the ranks pass different options, or decline different parts; or `rename` has a key
            that no target has, and the load is strict.
        StorageError: the ranks see different checkpoints.
        KeyMismatchError: the state and the checkpoint do not fit.
    """
    _check_same(location, reports)
    excludes = set.intersection(*(set(report.unused_excludes) for report in reports))
    if excludes:
        _log.warning("%s: %s", location, no_match("exclude", sorted(excludes), list(stored())))
    narrowed = sorted({text for report in reports for text in report.narrowed})
    if narrowed:
        _log.warning(
            "%s: cast= drops fractions and changes numbers that do not fit: %s", location, _first(narrowed)
        )
    renames = dict(set.intersection(*(set((report.unused_renames or {}).items()) for report in reports)))
    strict = reports[0].strict
    missing = sorted({key for report in reports for key in report.missing})
    mismatched = sorted({item for report in reports for item in report.mismatched})
    # A key is left over if no rank requests it. It is no mismatch if its part is absent on all ranks.
    leftover = set.intersection(*({*report.unexpected, *report.of_absent_parts} for report in reports))
    unexpected = sorted(leftover.intersection(key for report in reports for key in report.unexpected))
    if mismatched or (strict and (missing or unexpected)):
        raise _mismatch(
            location,
            missing if strict else [],
            unexpected if strict else [],
            mismatched,
            renames,
            _unwrapping(missing, unexpected) if reports[0].unused_renames is None else {},
        )
    if {report.excludes_all for report in reports} - {None} == {True}:
        raise StructureError(
            f"{location}: exclude leaves no key of the target, so that the load would fill nothing. "
            "Leave out fewer keys"
        )
    if renames:
        text = f"{location}: rename has keys that the target does not have: {renames}"
        if strict:
            raise StructureError(
                f"{text}. It maps a key of the target to a stored key. Correct the key, or leave it out; "
                "nothing was changed",
                keys=sorted(renames),
            )
        _log.warning("%s", text)
    if missing:
        _check_overlap(location, reports, missing, sorted(leftover), stored)
    adapted = {key for report in reports for key in report.adapted}
    for report in reports if adapted else ():  # only those that belong to no rank's target
        adapted &= {*report.adapted, *report.unexpected, *report.of_absent_parts}
    return AgreedKeys(
        tuple(missing),
        tuple(sorted(leftover)),
        tuple(_dropped(reports, stored)),
        tuple(sorted(adapted)),
    )


def _check_same(location: str, reports: Sequence[MatchReport]) -> None:
    """Checks that options, parts and checkpoint are the same on all ranks.

    Raises:
        StructureError, StorageError: see `agree`.
    """
    for rank, report in enumerate(reports):
        for option in ("strict", "read_once"):
            one, other = getattr(reports[0], option), getattr(report, option)
            if one != other:
                raise StructureError(
                    f"{location}: rank 0 loads with {option}={one}, rank {rank} with {option}={other}; "
                    "nothing was changed",
                    ranks=[0, rank],
                )
        if report.declined != reports[0].declined:
            raise StructureError(
                f"{location}: ranks do not leave the same parts of the state as they are: rank 0 leaves "
                f"{list(reports[0].declined)}, rank {rank} {list(report.declined)}; nothing was changed",
                ranks=[0, rank],
            )
    attempts = {report.attempt: rank for rank, report in reversed(list(enumerate(reports)))}
    if len(attempts) > 1:
        seen = ", ".join(f"rank {rank} sees attempt {attempt}" for attempt, rank in sorted(attempts.items()))
        raise StorageError(
            f"{location}: ranks see different checkpoints: {seen}. Check that all nodes share this folder, "
            "and that no other job saves there",
            file=location,
            damaged=False,
        )


def _check_overlap(
    location: str,
    reports: Sequence[MatchReport],
    missing: Sequence[str],
    leftover: Sequence[str],
    stored: Callable[[], Iterable[str]],
) -> None:
    """Without `strict`: checks that the target and the checkpoint have keys in common.

    A wrong prefix leaves almost all keys of both sides. A part of a model leaves those of one side.

    Raises:
        KeyMismatchError: the checkpoint has no key of the target.
    """
    found = sum(report.found for report in reports)
    wanted = found + sum(len(report.missing) for report in reports)
    count = len(list(stored()))
    used = count - len(leftover)
    if found and (_FEW * found >= wanted or _FEW * used >= count):
        return
    text = (
        f"{location}: the load fills {found} of {wanted} keys of the target, from {used} of {count} keys of "
        f"the checkpoint. The target has {_first(missing)}; the checkpoint has {_first(leftover)}. If the "
        "names differ only by a prefix, rename= maps them"
    )
    if not found:
        raise KeyMismatchError(
            f"{text}. Nothing was changed", missing=list(missing), unexpected=list(leftover), mismatched=[]
        )
    _log.warning("%s", text)


def _first(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "") if keys else "no other keys"


def _dropped(reports: Sequence[MatchReport], stored: Callable[[], Iterable[str]]) -> list[str]:
    """Per-rank values of the checkpoint that no rank loads, although a target has their key."""
    per_rank = [frozenset(report.per_rank) for report in reports]
    keys = frozenset[str]().union(*per_rank)
    if not keys:
        return []
    gathered = {key for report in reports for key in report.gathered}
    owners = {owner for owner in map(owner_of, stored()) if owner is not None and owner[0] in keys}
    dropped = [
        (key, rank)
        for key, rank in sorted(owners)
        if key not in (per_rank[rank] if rank < len(reports) else gathered)
    ]
    return [f"{key}.@rank-{rank}" if key else f"@rank-{rank}" for key, rank in dropped]


def _is_within(key: str, above: str) -> bool:
    return f"{key}.".startswith(f"{above}.")


def _mismatch(
    location: str,
    missing: list[str],
    unexpected: list[str],
    mismatched: list[_Mismatch],
    renames: Mapping[str, str],
    wrapped: Mapping[str, str],
) -> KeyMismatchError:
    """One error that lists all mismatches.

    No target has the keys of `renames`. Keys that these entries explain are left out. A load with the rename
    `wrapped` finds the missing keys.
    """
    renames = {new: old for new, old in renames.items() if any(_is_within(key, new) for key in unexpected)}
    missing = [key for key in missing if not any(_is_within(key, old) for old in renames.values())]
    unexpected = [key for key in unexpected if not any(_is_within(key, new) for new in renames)]
    differences = [f"{key}: expected {want}, found {got}" for key, want, got in mismatched]
    lines = [f"{location} does not fit the state it is loaded into; nothing was changed."]
    pairs = [f"{new!r}: {old!r}" for new, old in sorted(renames.items())]
    for title, keys, advice in (
        (
            "rename has keys that the target does not have",
            pairs,
            "it maps a key of the target to a stored key",
        ),
        ("missing in the checkpoint", missing, "strict=False leaves them as they are"),
        ("in the checkpoint, not asked for", unexpected, "strict=False or exclude= ignores them"),
        ("different", differences, "exclude= skips them"),
    ):
        if keys:
            lines.append(f"  {title} ({len(keys)}; {advice}):")
            lines.extend(f"    {key}" for key in keys[:20])
            if len(keys) > 20:
                lines.append(f"    ... and {len(keys) - 20} more")
    if missing and wrapped:
        lines.append(
            "  The stored keys have the prefix of a wrapper such as DistributedDataParallel: "
            f"rename={dict(wrapped)} loads them"
        )
    if any(f".{key}".endswith(".state") and want == "an empty dict" for key, want, _ in mismatched):
        lines.append(
            "  An optimizer's state_dict() has an empty state before the first step: put the optimizer "
            "itself into the state"
        )
    return KeyMismatchError(
        "\n".join(lines),
        missing=missing,
        unexpected=unexpected,
        mismatched=[list(item) for item in mismatched],
    )


def renamed(catalogue: Catalogue, rename: Mapping[str, str] | None) -> tuple[Catalogue, dict[str, str]]:
    """The catalogue under the target's names, and each of those names as the checkpoint has it.

    `rename` has the key in the checkpoint by the key in the target; see `rename_keys`. The result lacks the
    stored keys that it displaces.

    Raises:
        StructureError: a stored key is not in the checkpoint, or two keys get one name.
    """
    if not rename:
        return catalogue, {}
    names = rename_keys((*catalogue.tensors, *catalogue.objects), rename, stored_first=False)
    objects = {names[key]: key for key in catalogue.objects if key in names}
    view = replace(
        catalogue,
        tensors={names[key]: value for key, value in catalogue.tensors.items() if key in names},
        aliases={
            names[key]: names[value]
            for key, value in catalogue.aliases.items()
            if key in names and value in names
        },
        objects=LazyMapping(objects, lambda key: _with_references(catalogue.objects[objects[key]], names)),
        paths=lambda: {
            names[key]: path
            for key, old in catalogue.paths().items()
            if key in names and (path := renamed_path(old, names[key])) is not None
        },
    )
    return view, {target: stored for stored, target in names.items()}


def _with_references(value: Any, names: Mapping[str, str]) -> Any:
    """A plain value whose references to tensors follow the renaming."""
    if isinstance(value, list):
        return [_with_references(item, names) for item in value]
    if isinstance(value, dict):
        return {
            key: names.get(item, item)
            if key == "$tensor" and isinstance(item, str)
            else _with_references(item, names)
            for key, item in value.items()
        }
    return value
