"""Maps the rows of a joined tensor to the rows of its parts, as boxes of both.

The joined tensor is Megatron's, for example the fused query, key and value. The parts are those of Hugging
Face. A layout is a list of runs of rows, so the same list serves both directions. `Hyperparameters` are the
numbers of a model that keys and shapes do not show: heads, query groups, the size of the vocabulary.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from shardproof.errors import PlainDataError, StructureError

_Shape = tuple[int, ...]
_MOST_GROUPS = 65536
"""It bounds the work for a wrong shape."""
CONFIG = "config.json"
"""Key of the configuration of Hugging Face among the values that a key map gets."""
_IN_CONFIG = {
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "layers": ("num_hidden_layers", "n_layer"),
    "vocab": ("vocab_size",),
}
"""Names in ``config.json``."""
_IN_ARGS = {
    "heads": ("num_attention_heads",),
    "groups": ("num_query_groups",),
    "head_dim": ("kv_channels",),
    "layers": ("num_layers",),
    "vocab": ("vocab_size",),
}
"""Names in the arguments of Megatron."""
_CHANGES_VALUES = {
    "rotary_interleaved": "rotates neighbouring elements of a head, while Hugging Face rotates its halves",
    "apply_layernorm_1p": "stores the weights of norms less 1",
}
"""Arguments of Megatron with which the values differ from those of Hugging Face, and how."""
_ARGUMENTS = {name for names in _IN_ARGS.values() for name in names} | {
    *_CHANGES_VALUES,
    "group_query_attention",
}
_ARGUMENT = re.compile(r"(?:.*[./])?args\.(\w+)")
"""Key of one argument."""


class LayoutMismatch(ValueError):
    """A shape does not have the layout. The text has the expected and the found value, without the key."""


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """A box of the joined tensor, and the box of a part that has the same elements."""

    offsets: _Shape
    sizes: _Shape
    part: int
    part_offsets: _Shape
    part_sizes: _Shape
    transposed: bool
    """True if the box of the part is the transpose of the other."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A joined tensor and its parts."""

    joined: _Shape
    parts: tuple[_Shape, ...]
    pieces: Sequence[JoinedPart]
    padding: Sequence[tuple[_Shape, _Shape]] = ()
    """Offsets and sizes of boxes of the joined tensor that no part has."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that follow from the arrangement, by their names in the shapes of rules."""


class _Run(NamedTuple):
    """Consecutive rows."""

    row: int
    """First row of the joined tensor."""
    rows: int
    part: int | None
    """None for padding."""
    part_row: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a joined tensor and of its parts."""

    joined: int
    parts: tuple[int, ...]
    runs: Sequence[_Run]
    sizes: Mapping[str, int] = field(default_factory=dict)


class _RowLayout(ABC):
    """Computes which rows of a joined tensor belong to which part."""

    parts: int
    """Number of parts."""

    @abstractmethod
    def split(self, rows: int, known: Hyperparameters) -> _Rows:
        """From the number of rows of the joined tensor. Raises `LayoutMismatch`."""

    @abstractmethod
    def join(self, rows: Sequence[int], known: Hyperparameters) -> _Rows:
        """From the numbers of rows of the parts. Raises `LayoutMismatch`."""


class _EqualRows(_RowLayout):
    """Parts of one size, one after the other: the gate and the up projection."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def split(self, rows: int, known: Hyperparameters) -> _Rows:
        if rows % self.parts:
            raise LayoutMismatch(f"expected a multiple of {self.parts} rows, found {rows}")
        size = rows // self.parts
        runs = [_Run(part * size, size, part) for part in range(self.parts)]
        return _Rows(rows, (size,) * self.parts, runs)

    def join(self, rows: Sequence[int], known: Hyperparameters) -> _Rows:
        if len(set(rows)) > 1:
            raise LayoutMismatch(f"expected equal numbers of rows, found {list(rows)}")
        return self.split(sum(rows), known)


class _Vocabulary(_RowLayout):
    """A row for each token. The joined tensor may have padding behind them."""

    parts = 1

    def split(self, rows: int, known: Hyperparameters) -> _Rows:
        tokens = rows if known.vocab is None else known.vocab
        if tokens > rows:
            raise LayoutMismatch(f"expected at least {tokens} rows (vocab), found {rows}")
        return _Rows(rows, (tokens,), [_Run(0, tokens, 0)])

    def join(self, rows: Sequence[int], known: Hyperparameters) -> _Rows:
        (tokens,) = rows
        padded = tokens if known.padded_vocab is None else known.padded_vocab
        if padded < tokens:
            raise LayoutMismatch(f"expected at most {padded} rows (padded_vocab), found {tokens}")
        return _Rows(padded, (tokens,), [_Run(0, tokens, 0), _Run(tokens, padded - tokens, None)])


class _QueryGroups(_RowLayout):
    """For each query group: the rows of its queries, then of its key, then of its value.

    Args:
        in_one: True if the parts are one tensor: all queries, then all keys, then all values.
    """

    def __init__(self, *, in_one: bool) -> None:
        self.parts = 1 if in_one else 3

    def split(self, rows: int, known: Hyperparameters) -> _Rows:
        heads, groups, size = known.heads, known.groups, known.head_dim
        if heads is None and groups is not None and size is not None and rows % size == 0:
            heads = rows // size - 2 * groups
        if groups is None and heads is not None and size is not None and rows % size == 0:
            groups = (rows // size - heads) // 2
        if heads is None or groups is None:
            raise LayoutMismatch(
                f"{rows} rows of query, key and value can be split in several ways, and the checkpoint does "
                "not say in which: add two of ?heads=NUMBER&groups=NUMBER&head_dim=NUMBER to the map"
            )
        if size is None:
            size = rows // max(heads + 2 * groups, 1)
        return self._rows(heads, groups, size, rows, None)

    def join(self, rows: Sequence[int], known: Hyperparameters) -> _Rows:
        if self.parts == 1:
            return self.split(rows[0], known)
        queries, keys, values = rows
        if keys != values:
            raise LayoutMismatch(f"expected as many rows of keys as of values, found {keys} and {values}")
        size = known.head_dim
        if size is None and known.heads:
            size = queries // known.heads
        if size is None and known.groups:
            size = keys // known.groups
        if not size:
            raise LayoutMismatch(
                f"{queries} rows of queries can be divided in several ways, and the checkpoint does not say "
                "in which: add one of ?heads=NUMBER&groups=NUMBER&head_dim=NUMBER to the map"
            )
        heads = queries // size if known.heads is None else known.heads
        groups = keys // size if known.groups is None else known.groups
        return self._rows(heads, groups, size, queries + 2 * keys, list(rows))

    def _rows(self, heads: int, groups: int, size: int, rows: int, found: list[int] | None) -> _Rows:
        parts = [heads * size, groups * size, groups * size]
        text = f"{heads} heads, {groups} query groups, head_dim {size}"
        if heads < 1 or not 1 <= groups <= _MOST_GROUPS or heads % groups:
            raise LayoutMismatch(f"expected heads that 1 to {_MOST_GROUPS} query groups divide, found {text}")
        if sum(parts) != rows or found not in (None, parts):
            raise LayoutMismatch(f"expected {parts} rows ({text}), found {found or rows}")
        bases = [0, *accumulate(parts[:-1])]
        group = [heads // groups * size, size, size]
        starts = [0, *accumulate(group[:-1])]
        runs = [
            _Run(at * sum(group) + starts[part], group[part], 0, bases[part] + at * group[part])
            if self.parts == 1
            else _Run(at * sum(group) + starts[part], group[part], part, at * group[part])
            for at in range(groups)
            for part in range(3)
        ]
        return _Rows(
            rows,
            (rows,) if self.parts == 1 else tuple(parts),
            runs,
            {"q": parts[0], "kv": parts[1], "head_dim": size},
        )


class JoinedLayout:
    """A joined tensor and its parts.

    Args:
        rows: which rows belong to which part.
        transposed: True if parts of two dimensions are stored transposed, as those of Conv1D.
    """

    def __init__(self, rows: _RowLayout, *, transposed: bool = False) -> None:
        self._rows = rows
        self._transposed = transposed
        self.parts = rows.parts
        """Number of parts."""

    def split(self, shape: _Shape, known: Hyperparameters) -> Arrangement:
        """The parts of a joined tensor.

        Raises:
            LayoutMismatch: the shape does not have this layout.
        """
        self._check_dimensions(shape)
        return self._arranged(self._rows.split(shape[0], known), shape[1:])

    def join(self, shapes: Sequence[_Shape], known: Hyperparameters) -> Arrangement:
        """The joined tensor of parts.

        Raises:
            LayoutMismatch: the shapes do not have this layout.
        """
        for shape in shapes:
            self._check_dimensions(shape)
        upright = [shape[::-1] if self._transposed else shape for shape in shapes]
        rests = {shape[1:] for shape in upright}
        if len(rests) > 1:
            raise LayoutMismatch(
                f"expected shapes that differ in rows alone, found {list(map(list, shapes))}"
            )
        return self._arranged(self._rows.join([shape[0] for shape in upright], known), rests.pop())

    def _check_dimensions(self, shape: _Shape) -> None:
        if not shape or (self._transposed and len(shape) > 2):
            expected = "1 or 2 dimensions" if self._transposed else "at least 1 dimension"
            raise LayoutMismatch(f"expected {expected}, found shape {list(shape)}")

    def _arranged(self, rows: _Rows, rest: _Shape) -> Arrangement:
        turned = self._transposed and bool(rest)
        start = (0,) * len(rest)

        def upright(first: int, others: _Shape) -> _Shape:
            return (*others, first) if turned else (first, *others)

        return Arrangement(
            (rows.joined, *rest),
            tuple(upright(count, rest) for count in rows.parts),
            [
                JoinedPart(
                    (run.row, *start),
                    (run.rows, *rest),
                    run.part,
                    upright(run.part_row, start),
                    upright(run.rows, rest),
                    turned,
                )
                for run in rows.runs
                if run.part is not None
            ],
            [((run.row, *start), (run.rows, *rest)) for run in rows.runs if run.part is None and run.rows],
            rows.sizes,
        )


LAYOUTS: Mapping[str, JoinedLayout] = {
    "same": JoinedLayout(_EqualRows(1)),
    "transposed": JoinedLayout(_EqualRows(1), transposed=True),
    "gate_up": JoinedLayout(_EqualRows(2)),
    "vocabulary": JoinedLayout(_Vocabulary()),
    "qkv": JoinedLayout(_QueryGroups(in_one=False)),
    "qkv_conv1d": JoinedLayout(_QueryGroups(in_one=True), transposed=True),
}
"""By the name that rules use.

- same: one part, equal.
- transposed: one part, transposed (biases are not).
- gate_up: two parts of one size, one after the other.
- vocabulary: one part; the joined tensor may have padding behind its rows.
- qkv: queries, keys and values; the joined tensor has them group by group.
- qkv_conv1d: the same, where one transposed part has all queries, then all keys, then all values (GPT-2).
"""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Numbers of a model; None where unknown."""

    heads: int | None = None
    """Attention heads of a layer."""
    groups: int | None = None
    """Query groups of a layer: heads that keys and values have."""
    head_dim: int | None = None
    """Rows of the queries of one head."""
    layers: int | None = None
    vocab: int | None = None
    """Tokens: rows of the embedding without padding."""
    padded_vocab: int | None = None
    """Rows of the embedding with padding."""


def hyperparameters(
    given: Mapping[str, int], config_path: str | None, objects: Mapping[str, Any]
) -> Hyperparameters:
    """The numbers of a model: given ones, else from ``config.json``, else from the arguments of Megatron.

    Args:
        given: by the names of `Hyperparameters`; they take precedence.
        config_path: a ``config.json`` or its folder; None for the one of the checkpoint, if any.
        objects: values of the stored checkpoint by key, and its ``config.json`` under that name.
    """
    config = objects.get(CONFIG) if config_path is None else _read_config(config_path)
    args = _megatron_args(objects)
    for name, what in _CHANGES_VALUES.items():
        if args.get(name):
            raise StructureError(
                f"the model was trained with {name}, so Megatron {what}: no map of keys can convert it"
            )
    in_config, in_args = _numbers(_IN_CONFIG, config or {}), _numbers(_IN_ARGS, args)
    if "heads" in in_config:
        in_config.setdefault("groups", in_config["heads"])
    if not args.get("group_query_attention"):  # then num_query_groups has no meaning
        in_args.pop("groups", None)
        if "heads" in in_args and "group_query_attention" in args:
            in_args["groups"] = in_args["heads"]
    return Hyperparameters(**{**in_args, **in_config, **given})


def _numbers(names: Mapping[str, tuple[str, ...]], source: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    for name, candidates in names.items():
        value = next((source[item] for item in candidates if item in source), None)
        if type(value) is int and value > 0:
            found[name] = value
    return found


def _read_config(path: str) -> dict[str, Any]:
    file = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    try:
        with open(file, "rb") as opened:
            value = json.load(opened)
    except (OSError, ValueError, RecursionError) as error:
        raise StructureError(f"the key map cannot read the configuration {file}: {error}") from error
    if not isinstance(value, dict):
        raise StructureError(f"the configuration {file} is not a JSON object")
    return value


def _megatron_args(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron that a checkpoint has: in its common state, or as separate values."""
    args: dict[str, Any] = {}
    for key in objects:
        if key in ("common", "common.args"):
            value = _readable(objects, key)
            found = value.get("args") if key == "common" and isinstance(value, dict) else value
            args |= found if isinstance(found, dict) else {}
        elif (match := _ARGUMENT.fullmatch(key)) and match[1] in _ARGUMENTS:
            args[match[1]] = _readable(objects, key)
    return args


def _readable(objects: Mapping[str, Any], key: str) -> Any:
    """A value; None if it is not plain data."""
    try:
        return objects[key]
    except PlainDataError:
        return None
