"""The request and the plan of a conversion: what is written, and where it comes from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardproof._utils.arguments import check_boolean, wrong_type
from shardproof._utils.humanize import printable
from shardproof._utils.mappings import LazyMapping
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import foreign_of, is_paths_key, renamed_path
from shardproof.engine.loading import Checkpoint, NativeCheckpoint
from shardproof.engine.planning import check_patterns, rename_keys, selects
from shardproof.engine.state import optimizer_state_dicts, references, with_new_key
from shardproof.engine.storage import is_url
from shardproof.errors import PlainDataError, StructureError
from shardproof.formats import Contents, FormatWriter, WriteOptions, read_json, writer_of
from shardproof.formats.conversion.key_maps import (
    CONFIG,
    KeyMap,
    MappedTensor,
    Move,
    apply_key_map,
    key_map_label,
)

_FLOATING = ("float16", "bfloat16", "float32", "float64")
_PIECES_IN_MEMORY = 6
"""Copies of a piece that a worker holds at once, at most: stored, scratch, cast, and those of the writer."""
_MIN_PIECE, _MAX_PIECE = 1 << 20, 64 << 20


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """What is written. Equal requests for an unchanged checkpoint give equal plans on every process."""

    tensors: Mapping[str, MappedTensor]
    """By key of the written checkpoint."""
    writer: FormatWriter
    objects: int
    """Number of plain values to write."""
    digest: str
    """Equal for equal plans, 32 hexadecimal digits."""
    left_out: tuple[str, ...]
    """Keys of the stored checkpoint that are not written."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors to write."""
        return sum(unit.nbytes for unit in self.writer.units)


def plan_conversion(checkpoint: Checkpoint, request: ConversionRequest) -> ConversionPlan:
    """Plans a conversion. It reads metadata and plain values, and no tensor.

    Raises:
        StructureError: a pattern or a rename fits no key, the patterns leave no key, two keys get one name,
            the key map does not fit, or the format cannot hold a tensor.
        PlainDataError: values are not plain data; the message names all of them.
        ValueError: the format cannot be written, or the dtype is unknown.
    """
    for option, patterns in (("include", request.include), ("exclude", request.exclude)):
        check_patterns(option, patterns, checkpoint.keys())
    selected = selects(request.include, request.exclude)
    if (request.include or request.exclude) and not any(map(selected, checkpoint)):
        raise StructureError(f"include and exclude leave no key of {checkpoint.location}: nothing to convert")
    inside: set[str] = set()  # tensors that are parts of plain values, which contain them
    if isinstance(checkpoint, NativeCheckpoint):
        values = [value for key, value in checkpoint.objects.items() if selected(key)]
        inside = {key for key, _ in references(values)}
    aliases = {key: other for key, other in checkpoint.aliases.items() if selected(key) and key not in inside}
    tensors = {
        item.key: MappedTensor(item.dtype, item.shape, [_whole(item.key, item.shape)])
        for item in checkpoint.tensors
        if selected(item.key) and item.key not in inside
    }
    for alias, other in list(aliases.items()):
        if other not in tensors:  # the name that holds the bytes is left out
            tensors[alias] = MappedTensor(
                checkpoint.dtype(other), checkpoint.shape(other), [_whole(other, checkpoint.shape(other))]
            )
            del aliases[alias]
    unmapped: list[str] = []
    new_writer = writer_of(request.to)
    if request.key_map is None:
        objects = _plain_values(checkpoint, lambda key: selected(key) and not is_paths_key(key))
        if new_writer.stores_state_dicts:
            tensors, aliases, objects = _with_state_dicts(tensors, aliases, objects)
    else:
        tensors, aliases, unmapped = _mapped(checkpoint, request, tensors, aliases)
        objects = {}
    new_name = rename_keys([*tensors, *aliases, *objects], request.rename, stored_first=True).__getitem__
    recorded = checkpoint.paths
    renamed = {new_name(key): recorded[key] for key in [*tensors, *aliases, *objects] if key in recorded}
    paths = {key: path for key, old in renamed.items() if (path := renamed_path(old, key)) is not None}
    cast = _caster(request.dtype)
    tensors = {new_name(key): MappedTensor(cast(t.dtype), t.shape, t.moves) for key, t in tensors.items()}
    contents = Contents(
        {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()},
        {new_name(key): new_name(other) for key, other in aliases.items()},
        {new_name(key): with_new_key(key, new_name(key), value) for key, value in objects.items()},
        checkpoint.step,
        checkpoint.metadata,
        _time(checkpoint, request.source),
        paths,
        provenance=checkpoint.provenance,
    )
    options = WriteOptions(request.max_file_bytes, piece_bytes(request))
    writer = new_writer(contents, options)
    units = [(unit.name, unit.boxes) for unit in writer.units]
    without_map = replace(
        request, key_map=None, workers=1, memory_bytes=0, source="", register=(), temporary=""
    )
    described: list[Any] = [checkpoint.attempt, asdict(without_map), key_map_label(request.key_map), units]
    if request.key_map is not None:
        described.append([(key, t.shape, list(map(repr, t.moves))) for key, t in tensors.items()])
    digest = hashlib.sha256(json.dumps(described, default=list).encode()).hexdigest()[:32]
    left_out = (*(key for key in checkpoint if not selected(key) and not is_paths_key(key)), *unmapped)
    return ConversionPlan(tensors, writer, len(objects), digest, left_out)


def _with_state_dicts(
    tensors: Mapping[str, MappedTensor], aliases: Mapping[str, str], objects: Mapping[str, Any]
) -> tuple[dict[str, MappedTensor], dict[str, str], dict[str, Any]]:
    """Gives the state of live optimizers the keys of torch's state dicts."""
    new, values, replaced = optimizer_state_dicts([*tensors, *aliases], objects)
    return (
        {new.get(key, key): tensor for key, tensor in tensors.items()},
        {new.get(key, key): new.get(other, other) for key, other in aliases.items()},
        {key: value for key, value in objects.items() if key not in replaced} | values,
    )


def _mapped(
    checkpoint: Checkpoint,
    request: ConversionRequest,
    tensors: Mapping[str, MappedTensor],
    aliases: Mapping[str, str],
) -> tuple[dict[str, MappedTensor], dict[str, str], list[str]]:
    """Applies the key map to the selected tensors.

    Returns:
        The written tensors; tied keys, each with the key that it equals; the selected keys that are not
        written. Plain values are not written, because they belong to the project that stored them.
    """
    assert request.key_map is not None
    stored = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    stored |= {key: stored[other] for key, other in aliases.items()}
    storage = foreign_of(request.source).storage
    values = LazyMapping(
        [*checkpoint.objects, *([CONFIG] if storage.size(CONFIG) is not None else [])],
        lambda key: checkpoint[key] if key in checkpoint.objects else read_json(storage, CONFIG)[1],
    )
    result = apply_key_map(request.key_map, stored, values)
    holder = {key: move.key for key, tensor in tensors.items() for move in tensor.moves if move.key}
    holder |= {key: holder[other] for key, other in aliases.items()}
    written: dict[str, MappedTensor] = {}
    tied: dict[str, str] = {}
    for key, tensor in result.tensors.items():
        moves = [replace(move, key=move.key and holder[move.key]) for move in tensor.moves]
        written[key] = MappedTensor(tensor.dtype, tensor.shape, moves)
    for key, tensor in result.tensors.items():
        names = {move.key for move in tensor.moves} & aliases.keys()
        if names:
            equal = (other for other in written if other != key and written[other] == written[key])
            if (other := next(equal, None)) is not None:
                del written[key]
                tied[key] = other
    return written, tied, [*result.ignored, *checkpoint.objects]


def piece_bytes(request: ConversionRequest) -> int:
    """Bytes of one read of a worker, so that all workers together stay within the memory."""
    share = request.memory_bytes // (request.workers * _PIECES_IN_MEMORY)
    if share < _MIN_PIECE:
        raise ValueError(
            f"{request.memory_bytes} bytes of memory are too few for {request.workers} workers: give at "
            f"least {_MIN_PIECE * _PIECES_IN_MEMORY * request.workers}, or fewer workers"
        )
    return min(share, _MAX_PIECE)


def _time(checkpoint: Checkpoint, path: str) -> float:
    """Time of the new checkpoint, in seconds since 1970: that of the stored one, so that processes agree."""
    if isinstance(checkpoint, NativeCheckpoint):
        return checkpoint.manifest.time
    return 0 if is_url(path) else int(os.stat(path).st_mtime)


def _whole(key: str, shape: tuple[int, ...]) -> Move:
    start = (0,) * len(shape)
    return Move(start, shape, key, start, shape)


def _plain_values(checkpoint: Checkpoint, selected: Callable[[str], bool]) -> dict[str, Any]:
    values, refused = {}, []
    for key in checkpoint.objects:
        if selected(key):
            try:
                values[key] = checkpoint[key]
            except PlainDataError as error:
                refused.append((key, error))
    if refused:
        lines = "\n".join(f"  {printable(key)}: {error.message}" for key, error in refused[:20])
        more = f"\n  and {len(refused) - 20} more" if len(refused) > 20 else ""
        raise PlainDataError(
            f"{checkpoint.location}: {len(refused)} values are not plain data, so they cannot be converted. "
            f"Leave them out (--exclude KEY):\n{lines}{more}",
            path=refused[0][0],
            keys=[key for key, _ in refused],
        )
    return values


def _caster(dtype: str | None) -> Callable[[str], str]:
    if dtype is None:
        return lambda stored: stored
    if dtype not in DTYPES or dtype not in _FLOATING:
        raise ValueError(f"dtype is one of {', '.join(_FLOATING)}, not {dtype!r}")
    return lambda stored: dtype if stored in _FLOATING else stored


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """A conversion. Every process plans the same from an equal request."""

    source: str
    """Path of the stored checkpoint: its folder or file."""
    destination: str
    """Path or URL of the new checkpoint."""
    to: str
    """Name of the format to write."""
    format: str | None = None
    """Name of the stored format; None to find it."""
    dtype: str | None = None
    """Torch's name of the dtype that floating point tensors are converted to; None to leave them."""
    include: Sequence[str] | None = None
    """Patterns of the keys to convert; None for all."""
    exclude: Sequence[str] | None = None
    """Patterns of the keys to leave out."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Stored key to written key, for a key and all below it. An empty written key removes the prefix."""
    key_map: KeyMap | None = None
    """Map between the keys of two projects, applied after `include` and `exclude` and before `rename`."""
    max_file_bytes: int | None = None
    """Bytes of tensors in one file, at most; None for the format's default."""
    memory_bytes: int = 4 << 30
    """Memory of all processes together, above that of their libraries."""
    workers: int = 1
    """Processes that write units, on each machine."""
    trust_pickle: bool = False
    """True to unpickle values that are not plain data. This may run code in the checkpoint."""
    register: Sequence[str] = ()
    """Names for `shardproof.state.register_by_name`, which each process calls first."""
    like: str = ""
    """Folder of a model whose configuration and tokenizer are copied (format "hf"); empty for none."""
    temporary: str = ""
    """Folder for the work folder of a destination in an object store. Equal in all processes."""

    def __post_init__(self) -> None:
        if not (self.key_map is None or isinstance(self.key_map, str) or callable(self.key_map)):
            raise wrong_type(
                "key_map", self.key_map, "a name, the path of a TOML file as a text, a function or None"
            )
        check_boolean("trust_pickle", self.trust_pickle)
        if self.like and self.to != "hf":
            raise ValueError(f"like (--like) goes with the format hf, not with {self.to}")
        if self.max_file_bytes is not None and self.max_file_bytes < 1:
            raise ValueError(
                f"max_file_bytes (--max-file-size) is at least 1 or None, not {self.max_file_bytes}"
            )
        if self.workers < 1:
            raise ValueError(f"workers is at least 1, not {self.workers}")
