"""Reads checkpoints of ``torch.distributed.checkpoint`` (DCP), of torch 2.2 and newer.

A checkpoint is a folder. The file ``.metadata`` is a pickle. It gives the shape and the chunks of each
tensor, and the position of the entry of each chunk and object. An entry is a range of a ``.distcp`` file that
holds a whole archive of ``torch.save``.

torch's reader accepts chunks that overlap or leave a hole in a tensor, and does not check the CRC-32 of
entries. Reads through this description check both. Files that ``.metadata`` does not name are not read.

In ``fsdp_dtensor`` checkpoints, Megatron-Core splits each SwiGLU weight ``linear_fc1`` in two. The gate has
the suffix ``_w``, the up projection the suffix ``_v``. It splits the moments of the optimizer in the same
way, and stores all other slots, such as the step and the master weight, whole under both names.
`FsdpDTensorReader` joins them.
"""

from __future__ import annotations

import math
import operator
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import PurePosixPath
from typing import Any, ClassVar

import xxhash

from shardproof._utils.contexts import no_garbage_collection
from shardproof._utils.humanize import brief, listed
from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import (
    Extent,
    Foreign,
    FormatReader,
    ReadBudget,
    StoredBox,
    StoredView,
    TensorDescription,
    Unreadable,
    key_units,
    opaque_names,
    shape_of,
)
from shardproof.errors import FormatError
from shardproof.formats.megatron.megatron_run import iteration_of, latest_iteration
from shardproof.formats.pickle_data import read_pickle
from shardproof.formats.stream_transforms import DecodedPart, decoded_storage
from shardproof.formats.torch.torch_file import SmallPickles, TorchFile, TorchTensor, unpickled, with_tensors
from shardproof.formats.torch.torch_tensors import CONVERT

_METADATA = ".metadata"
_ARCHIVE_BYTES = 1 << 20
"""Bytes that the archive of a compressed entry may have beside those of its tensor."""
_MOST_OBJECT_BYTES = 1 << 30
"""Bytes of a compressed object after decoding, at most. ``.metadata`` does not give its size."""
_RANK_0_ONLY = (
    "torch before 2.3 wrote it: it stores the objects of rank 0 only, so those that other ranks had under "
    "keys of their own, for example random states, are not in it."
)
_GATE = re.compile(
    r"(?P<name>(?:.*\.)?mlp\.(?:shared_experts\.|experts\.(?:local_experts\.[0-9]+\.)?)?linear_fc1\."
    r"(?:weight|bias)[0-9]*)_w(?P<slot>\.\w+)?"
)
"""Key of a gate, or of a slot of its optimizer state."""


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """A range of a file that holds one chunk or one object."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...]
    """Names of the stream extensions that the writer applied, for example "stream.zstd/1"."""


class DcpReader(FormatReader):
    """A DCP checkpoint, open for reading; see `FormatReader`. A subclass may change what it describes.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from shardproof.storage import LocalStorage
        >>> path = tempfile.mkdtemp()
        >>> state = {"weight": torch.arange(6.0).reshape(3, 2), "step": 3}
        >>> _ = dcp.save(state, checkpoint_id=path)
        >>> reader = DcpReader(Foreign(LocalStorage(path)))
        >>> reader.tensors["weight"].shape, list(reader.object_keys()), reader.object("step")
        ((3, 2), ['step'], 3)
    """

    name = "dcp"
    joins_halves: ClassVar[bool] = True
    """True to read the two halves of a SwiGLU weight of Megatron-Core as one tensor."""

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(latest_iteration(foreign))
        self.step = iteration_of(self.storage.folder)
        self.entries: dict[str, DcpEntry] = {}
        """Entries of the objects, by key."""
        self._pickles: SmallPickles = {}
        self._budget = ReadBudget()
        self._last = threading.local()
        """The chunk that each thread opened last: several boxes can be in one."""
        self.read_metadata()

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder, or that of Megatron's latest iteration in it, has the file ``.metadata``."""
        return latest_iteration(foreign).has(_METADATA)

    def read_metadata(self) -> None:
        """Describes the content of the checkpoint. The constructor calls it once."""
        self.add_folder()
        if self.joins_halves and (joined := _join_halves(self.tensors, self.entries)):
            self.notes.append(
                "Megatron-Core stored SwiGLU weights in halves, whose names end in _w and _v. Each pair is "
                f"read as one tensor: {listed(joined)}."
            )

    def object_keys(self) -> Iterable[str]:
        """Keys of the objects."""
        return self.entries.keys()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """An object as plain data; see `FormatReader.object`."""
        return self.value_of(self.open_entry(self.entries[key]), key, trust_pickle)

    def files(self) -> Mapping[str, int | None]:
        """Files that hold entries; DCP records no sizes."""
        return dict(super().files()) | dict.fromkeys(entry.file for entry in self.entries.values())

    def verify_extra(self) -> int:
        """Verifies the entries of all objects; see `FormatReader.verify_extra`."""
        return sum(self.open_entry(entry).verify() for entry in self.entries.values())

    def value_of(self, file: TorchFile, key: str, trust_pickle: bool) -> Any:
        """The value of an open entry or file, as plain data."""
        if not trust_pickle or not opaque_names(file.value):
            return with_tensors(file, file.value)
        try:
            return unpickled(file)
        except Exception as error:  # unpickling may run any code
            raise FormatError(
                f"{file.path}: {key} cannot be unpickled ({type(error).__name__}: {error}). Install what it "
                "needs, or leave it out with exclude=",
                file=file.path,
                key=key,
            ) from error

    def add_folder(self, folder: str = "", prefix: str = "") -> Mapping[str, Any]:
        """Describes the tensors and objects of a folder with a file ``.metadata``.

        Args:
            folder: name of the folder with a "/" at the end; "" for the checkpoint itself.
            prefix: prefix of each key.

        Returns:
            The attributes of the pickled ``Metadata``.

        Raises:
            NotCommittedError: the folder has no ``.metadata``.
            FormatError: ``.metadata`` is damaged.
        """
        name = f"{folder}{_METADATA}"
        data = self.read_commit(name, "DCP checkpoint")
        self.identity = xxhash.xxh3_128_hexdigest(self.identity.encode() + data)
        path = f"{self.location}/{name}"
        builders = {"torch.Size": lambda sizes=(): tuple(sizes)}
        try:
            with no_garbage_collection():
                metadata = read_pickle(data, builders, file=path).value
                self._budget.grant(len(data))
                state: Mapping[str, Any] = metadata.state
                self._describe(state, folder, prefix)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self.fault(
                name, f"it does not have the structure that DCP writes ({brief(error)})"
            ) from error
        if metadata.name.startswith("torch.") and "storage_meta" not in state and self.entries:
            self.notes.append(_RANK_0_ONLY)
        return state

    def _describe(self, metadata: Mapping[str, Any], folder: str, prefix: str) -> None:
        """Reads keys, chunks and entries from the attributes of the pickled ``Metadata``."""
        entries = {}
        for index, info in metadata["storage_data"].items():
            key, offset = index.state["fqn"], index.state.get("offset")
            if not isinstance(key, str):
                raise ValueError(f"an entry belongs to {brief(key)}")
            entries[key, None if offset is None else shape_of(offset)] = self._entry(info.state, folder)
        if not prefix and isinstance(paths := metadata.get("planner_data"), dict):
            self.paths = {key: path for key, path in paths.items() if _spells(path, key)}
        first_at: dict[tuple[str, int], str] = {}
        """Key of the tensor whose first box lies at a byte of a file."""
        others = (self.tensors, self.aliases, self.entries, self.unreadable)
        for key, described in metadata["state_dict_metadata"].items():
            if not isinstance(key, str):
                raise self.fault(f"{folder}{_METADATA}", f"the key {brief(key)} is not a string")
            if any(prefix + key in known for known in others):
                raise self.fault(f"{folder}{_METADATA}", f"two values have the key {prefix + key}")
            match described.name.rpartition(".")[2]:
                case "TensorStorageMetadata":
                    tensor = self._tensor(key, described.state, entries, folder)
                    if isinstance(tensor, Unreadable):
                        self.unreadable[prefix + key] = tensor
                        continue
                    first = [(box.file, box.start) for box in tensor.boxes[:1]]
                    other = first_at.setdefault(first[0], prefix + key) if first else prefix + key
                    if other in self.tensors and _are_tied(tensor, self.tensors[other]):
                        self.aliases[prefix + key] = other
                    else:
                        self.tensors[prefix + key] = tensor
                case "BytesStorageMetadata":
                    self.entries[prefix + key] = self._entry_of(entries, key, None, folder)
                case kind:
                    raise self.fault(f"{folder}{_METADATA}", f"{key} is a {kind}, which is unknown")

    def _entry(self, state: Mapping[str, Any], folder: str) -> DcpEntry:
        name, offset, nbytes = state["relative_path"], state["offset"], state["length"]
        self._budget.charge(len(name))
        inside = inner_name(name)
        if inside is None:
            raise self.fault(
                f"{folder}{_METADATA}", f"the file name {brief(name)} leads out of the checkpoint"
            )
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in (offset, nbytes)):
            raise self.fault(
                f"{folder}{_METADATA}",
                f"an entry of {name} lies at byte {brief(offset)} and has {brief(nbytes)} bytes",
            )
        transforms = tuple(state.get("transform_descriptors") or ())
        self._budget.charge(len(transforms))
        if not all(isinstance(transform, str) for transform in transforms):
            raise self.fault(f"{folder}{_METADATA}", f"an entry of {name} has no names of extensions")
        return DcpEntry(folder + inside, offset, nbytes, transforms)

    def _entry_of(
        self, entries: Mapping[Any, DcpEntry], key: str, offsets: tuple[int, ...] | None, folder: str
    ) -> DcpEntry:
        entry = entries.get((key, offsets))
        if entry is None:
            chunk = "" if offsets is None else f" of the chunk at {offsets}"
            raise self.fault(f"{folder}{_METADATA}", f"the entry{chunk} of {key} is missing")
        return entry

    def _tensor(
        self, key: str, state: Mapping[str, Any], entries: Mapping[Any, DcpEntry], folder: str
    ) -> TensorDescription | Unreadable:
        properties = state["properties"].state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        name, shape = dtype.name.removeprefix("torch."), shape_of(state["size"])
        if name not in DTYPES:
            return Unreadable(f"a tensor of {dtype.name} and shape {list(shape)}", CONVERT)
        boxes = []
        self._budget.charge_values((1 + len(shape)) * len(state["chunks"]))
        for chunk in state["chunks"]:
            offsets, sizes = shape_of(chunk.state["offsets"]), shape_of(chunk.state["sizes"])
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise self.fault(
                    f"{folder}{_METADATA}",
                    f"a chunk of {key} has {len(sizes)} dimensions, expected {len(shape)}",
                )
            if 0 not in sizes:
                entry = self._entry_of(entries, key, offsets, folder)
                view = partial(self._view, key, name, offsets, sizes, entry)
                boxes.append(StoredBox(offsets, sizes, entry.file, entry.offset, entry.nbytes, view))
        return TensorDescription(name, shape, sorted(boxes, key=operator.attrgetter("offsets")))

    def open_entry(self, entry: DcpEntry, most: int = _MOST_OBJECT_BYTES) -> TorchFile:
        """Opens the archive of an entry; a compressed one has at most `most` bytes after decoding."""
        if not entry.transforms:
            return TorchFile(
                self.storage, entry.file, start=entry.offset, size=entry.nbytes, tensors=self._pickles
            )
        decoded = decoded_storage(
            self.storage, entry.file, entry.offset, entry.nbytes, entry.transforms, most
        )
        return TorchFile(decoded, entry.file)

    def _view(
        self, key: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], entry: DcpEntry
    ) -> StoredView:
        """The elements of a chunk. Checks that its entry has the dtype and sizes that ``.metadata`` gives."""
        last: tuple[Any, StoredView] | None = getattr(self._last, "chunk", None)
        if last is not None and last[0] == (entry, dtype, sizes):
            return last[1]
        view = self.chunk(key, dtype, offsets, sizes, entry)
        if not entry.transforms:
            self._last.chunk = (entry, dtype, sizes), view
            return view
        inner = view.extent

        def again() -> Extent:
            return self.chunk(key, dtype, offsets, sizes, entry).extent

        extent = DecodedPart(
            self.storage,
            entry.file,
            entry.offset,
            entry.nbytes,
            inner.start,
            inner.nbytes,
            inner.has_checksum,
            again,
            [inner],
        )
        return StoredView(extent, view.offset, view.stride)

    def chunk(
        self, key: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], entry: DcpEntry
    ) -> StoredView:
        """Opens the entry of a chunk, and checks its dtype and sizes.

        Raises:
            FormatError: the entry does not hold a tensor of this dtype and these sizes.
        """
        file = self.open_entry(entry, math.prod(sizes) * DTYPES[dtype].itemsize + _ARCHIVE_BYTES)
        found = file.value
        if not isinstance(found, TorchTensor) or (found.dtype, found.shape) != (dtype, sizes):
            raise FormatError(
                f"{file.path}: the entry of {key} at {offsets} is {brief(found)}, expected a tensor of "
                f"dtype {dtype} and shape {sizes}",
                file=file.path,
                key=key,
            )
        return file.view(found)


class DcpRawReader(DcpReader):
    """A DCP checkpoint, read under the keys that it stores. Only ``format=`` chooses it."""

    name = "dcp_raw"
    joins_halves = False

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """Never true."""
        return False


def _spells(path: Any, key: Any) -> bool:
    """True if a path of ``planner_data`` is one of `key`."""
    return (
        type(path) is tuple
        and len(path) > 0
        and all(type(step) in (str, int) for step in path)
        and sum(map(key_units, path)) <= len(key) + 3 * len(path)  # before a text of any length is joined
        and key == ".".join(map(str, path))
    )


def inner_name(name: str) -> str | None:
    """A file name of metadata in the form that a storage takes; None if it leads out of the checkpoint.

    Example:
        >>> inner_name("./__0_0.distcp"), inner_name("../secret"), inner_name("/etc/passwd")
        ('__0_0.distcp', None, None)
    """
    parts = PurePosixPath(name).parts
    if not parts or parts[0].startswith("/") or ".." in parts or "\0" in name:
        return None
    return "/".join(parts)


def _are_tied(one: TensorDescription, other: TensorDescription) -> bool:
    """True if two tensors have all their boxes in the same entries, as `DcpWriter` stores tied tensors."""
    if (one.dtype, one.shape, len(one.boxes)) != (other.dtype, other.shape, len(other.boxes)):
        return False
    place = operator.attrgetter("offsets", "sizes", "file", "start", "nbytes")
    return all(place(box) == place(same) for box, same in zip(one.boxes, other.boxes, strict=True))


def _pairs_of_halves(keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Finds the values that are stored under two keys.

    Returns:
        By the key without the suffix, the keys of gate and up projection. A pair is left out if one of the
        two is missing, or if the key without the suffix is stored too.

    Example:
        >>> _pairs_of_halves(["mlp.linear_fc1.bias_w", "mlp.linear_fc1.bias_v"])
        {'mlp.linear_fc1.bias': ('mlp.linear_fc1.bias_w', 'mlp.linear_fc1.bias_v')}
        >>> _pairs_of_halves(["mlp.linear_fc1.bias_w"])
        {}
    """
    known = set(keys)
    found = {}
    for key in sorted(key for key in known if "_w" in key):
        if match := _GATE.fullmatch(key):
            slot = match["slot"] or ""
            whole, up = f"{match['name']}{slot}", f"{match['name']}_v{slot}"
            if up in known and whole not in known:
                found[whole] = key, up
    return found


def _join_halves(tensors: dict[str, TensorDescription], objects: dict[str, Any]) -> list[str]:
    """Replaces each pair of halves or copies by the whole tensor. Pairs that fit neither rule remain.

    Args:
        tensors: tensors by key; changed in place.
        objects: positions of the objects by key; changed in place.

    Returns:
        The removed keys.
    """
    gone: list[str] = []
    pairs = _pairs_of_halves([*tensors, *objects])
    halves = {key: tensor.shape for key, tensor in tensors.items()} if pairs else {}
    for whole, pair in pairs.items():
        gate, up = pair
        if gate in tensors and up in tensors:
            half = halves.get(re.sub(r"(_w)\.\w+$", r"\1.exp_avg", gate))
            joined = _joined(tensors[gate], tensors[up], half)
            if joined is None:
                continue
            tensors[whole] = joined
        elif gate in objects and up in objects:
            objects[whole] = objects[gate]
        else:
            continue
        for key in pair:
            tensors.pop(key, None)
            objects.pop(key, None)
        gone += pair
    return gone


def _joined(
    gate: TensorDescription, up: TensorDescription, half: tuple[int, ...] | None
) -> TensorDescription | None:
    """The whole tensor of two halves or copies; None if they are neither. `half` is the shape of a half."""
    if (gate.dtype, gate.shape) != (up.dtype, up.shape):
        return None
    shape = gate.shape
    if prod(shape) == 1 and half != shape:
        return gate
    if not shape or half is None:
        return None
    if shape == (2 * half[0], *half[1:]):
        return gate
    if shape != half:
        return None
    rows = shape[0]
    boxes = [replace(box, offsets=(box.offsets[0] + rows, *box.offsets[1:])) for box in up.boxes]
    return TensorDescription(gate.dtype, (2 * rows, *shape[1:]), [*gate.boxes, *boxes])
