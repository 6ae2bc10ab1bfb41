"""Reads safetensors: one file, or a folder of Hugging Face or of torch's DCP with one file or several.

In a folder of Hugging Face, the reader takes the files of the index (``model.safetensors.index.json``).
Without an index, it takes the file with the usual name, or else all files. The index must agree with the
files. Quantised weights are read as they are stored.

A file of another project passes the same checks as a shard file of shardproof (`read_shard_header`). The
header has at most 100 MB, no entry overlaps another, and the entries fill the file without a hole. A file
may be cut: then the tensors before the cut are whole. A tensor of a dtype that torch does not have is listed,
and cannot be read.

torch's ``HuggingFaceStorageWriter`` writes one or more shards a rank. Each file gives the boxes of its
tensors in ``__metadata__``, under ``DCP_SHARDING_INFO``. No file gives the global shapes, so the size of a
dimension is the largest end of a box in it. The same writer also makes consolidated files. These are ordinary
files of Hugging Face, which `SafetensorsReader` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
import torch
import xxhash

from shardproof.dtypes import DTYPES
from shardproof.engine.foreign import (
    FileRange,
    Foreign,
    FormatReader,
    StoredBox,
    StoredView,
    TensorDescription,
    Unreadable,
)
from shardproof.engine.format import decode_strictly, index_name, read_shard_header
from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.formats.json_values import PREFIX, EmbeddedValues, HfIndex, read_json, top_level_files

_PAIR = "float4_e2m1fn_x2"
_DTYPES = {
    dtype.code: dtype.name
    for dtype in DTYPES.values()
    if dtype.parts == 1 and dtype.name != _PAIR and hasattr(torch, dtype.name)
}
"""Code in a safetensors header to torch's name of the dtype."""
_REMEDY = "This torch has no such dtype. Its writer can store the same bytes as U8"
_PAIRS_OF_FLOATS = "F4"
"""The code of 4-bit numbers. A header counts them one by one, and torch has one element for two of them."""
NO_CHECKSUMS = "safetensors has no checksums: changed bytes of tensors are not found."
"""Note of every checkpoint of this format."""
_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_OWN_INDEX = index_name("").partition("-")[0] + "-"
_STEMS = ("model", "adapter_model", "diffusion_pytorch_model")
"""Names that the libraries of Hugging Face give their files, without the suffix."""
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
_OFFSETS = "DCP_SHARDING_INFO"
_LAST_RANK = (
    "The format records no global shapes and no number of ranks: if the files of the last ranks are missing, "
    "tensors look shorter than they were saved."
)


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor of a safetensors file, in row-major order and little-endian."""

    dtype: str
    """Torch's name of the dtype, for example "bfloat16"."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int
    """One past the last byte in the file."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a safetensors file."""

    storage: Storage
    file: str
    """Name of the file in the storage."""
    metadata: dict[str, str]
    """The texts under ``__metadata__``."""
    tensors: dict[str, SafetensorsTensor]
    """Tensors by key, in the order of their bytes."""
    unreadable: dict[str, Unreadable]
    """Tensors of dtypes that torch does not have, by key."""
    data_start: int
    """First byte after the header."""
    data_end: int
    """One past the last byte of the last tensor. The tensors fill the file from `data_start` to here."""
    size: int
    """Bytes of the file; fewer than `data_end` if it was cut."""
    raw: bytes
    """All bytes before the data, as input of digests."""

    def extent(self, key: str) -> FileRange:
        """The bytes of a tensor. The format has no checksum.

        Raises:
            KeyError: the file has no such tensor.
        """
        tensor = self.tensors[key]
        return FileRange(self.storage, self.file, tensor.begin, tensor.end - tensor.begin)


def dtype_of_code(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Torch's dtype and shape for a code and a shape of a header; None if this torch has no such dtype.

    Example:
        >>> dtype_of_code("F8_E4M3", (2, 3))
        ('float8_e4m3fn', (2, 3))
        >>> dtype_of_code("F4", (2, 4))
        ('float4_e2m1fn_x2', (2, 2))
        >>> dtype_of_code("F6_E2M3", (4,))
    """
    if code == _PAIRS_OF_FLOATS and shape and shape[-1] % 2 == 0 and hasattr(torch, _PAIR):
        return _PAIR, (*shape[:-1], shape[-1] // 2)
    name = _DTYPES.get(code)
    return None if name is None else (name, shape)


def read_safetensors_header(storage: Storage, file: str, *, may_be_cut: bool = False) -> SafetensorsHeader:
    """Reads and checks the header of a safetensors file.

    It reads and allocates no more than the header, whatever sizes the file declares.

    Args:
        storage: the storage that holds the file.
        file: name of the file.
        may_be_cut: True to accept a file that ends before its last tensor does.

    Raises:
        FormatError: the header breaks a rule of safetensors, or does not fit the size of the file.
        StorageError: the file is missing or unreadable.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save
        >>> from shardproof.storage import LocalStorage
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> storage.publish("a.safetensors", save({"weight": torch.zeros(2, 3, dtype=torch.bfloat16)}))
        >>> header = read_safetensors_header(storage, "a.safetensors")
        >>> tensor = header.tensors["weight"]
        >>> tensor.dtype, tensor.shape, tensor.end - tensor.begin
        ('bfloat16', (2, 3), 12)
    """
    header = read_shard_header(storage, file, any_dtype=True, may_be_cut=may_be_cut)
    tensors, unreadable = {}, {}
    for key, code, shape, begin, end in header.entries:
        found = dtype_of_code(code, shape)
        if found is None:
            unreadable[key] = Unreadable(f"a tensor of dtype {code} and shape {list(shape)}", _REMEDY)
        else:
            tensors[key] = SafetensorsTensor(*found, begin, end)
    data_end = header.entries[-1][4] if header.entries else header.data_start
    return SafetensorsHeader(
        storage,
        file,
        header.metadata,
        tensors,
        unreadable,
        header.data_start,
        data_end,
        header.size,
        header.raw,
    )


def describe_safetensors(header: SafetensorsHeader) -> dict[str, TensorDescription]:
    """The tensors of a file, by key."""
    found = {}
    for key, tensor in header.tensors.items():
        view = StoredView.dense(tensor.shape, header.extent(key))
        found[key] = TensorDescription(tensor.dtype, tensor.shape, StoredBox.whole(tensor.shape, view))
    return found


class SafetensorsReader(FormatReader):
    """Safetensors files, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"weight": torch.arange(6.0).reshape(3, 2)}, f"{folder}/model.safetensors")
        >>> reader = SafetensorsReader(Foreign(LocalStorage(folder)))
        >>> reader.tensors["weight"].dtype, reader.tensors["weight"].shape
        ('float32', (3, 2))
    """

    name = "safetensors"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        self._sizes: dict[str, int] = {}
        self._tensor_bytes = 0
        digest = xxhash.xxh3_128()
        names, index = self._chosen(foreign)
        for name in names:
            header = self._header(name, index)
            digest.update(f"{name}\0".encode())
            digest.update(header.raw)
            self._add(name, header, index)
        self.identity = digest.hexdigest()
        self._embedded = self._read_embedded(next(iter(names), ""))
        if index is not None and index.total_size not in (None, self._tensor_bytes):
            self.notes.append(
                f"The index gives {index.total_size} bytes for all tensors, but they have "
                f"{self._tensor_bytes}."
            )
        self.notes.append(NO_CHECKSUMS)
        if foreign.file is None:
            self._note_config(foreign)

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a safetensors file or an index of such files, and for a folder with one of the two.

        shardproof's own index file does not count. It remains in the folder while a step is removed.
        """
        if foreign.file is not None:
            return foreign.file.endswith((_SUFFIX, _INDEX_SUFFIX))
        usual = (stem + suffix for stem in _STEMS for suffix in (_SUFFIX, _INDEX_SUFFIX))
        others = (name for name in top_level_files(foreign, _SUFFIX) if not name.startswith(_OWN_INDEX))
        return any(map(foreign.has, usual)) or any(others)

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that a conversion of shardproof stored. Other writers store no values."""
        return self._embedded.objects

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value that a conversion of shardproof stored; see `FormatReader.object`."""
        return self._embedded.object(key)

    def files(self) -> Mapping[str, int | None]:
        """All files, with the sizes that their headers describe."""
        return self._sizes

    def _chosen(self, foreign: Foreign) -> tuple[Sequence[str], HfIndex | None]:
        """Names of the files to read, and their index."""
        if foreign.file is not None:
            if foreign.file.endswith(_INDEX_SUFFIX):
                return self._indexed(foreign.file)
            return [foreign.file], None
        names = top_level_files(foreign, _SUFFIX)
        indices = top_level_files(foreign, _INDEX_SUFFIX)
        usual = [stem + _SUFFIX for stem in _STEMS if stem + _SUFFIX in names]
        if len(indices) + len(usual) > 1:
            raise FormatError(
                f"{self.location} has {' and '.join([*indices, *usual])}. They may differ: name the one file "
                "to read",
                file=self.location,
            )
        if indices:
            return self._indexed(indices[0])
        if not names:
            raise NotCommittedError(f"{self.location} has no file *{_SUFFIX}", file=self.location)
        if usual:
            self._note_unread(set(names).difference(usual))
            return usual, None
        self._check_numbers(names)
        return names, None

    def _indexed(self, name: str) -> tuple[Sequence[str], HfIndex]:
        index = HfIndex.read(self.storage, name)
        self._note_unread(set(top_level_files(Foreign(self.storage), _SUFFIX)).difference(index.keys_of))
        return sorted(index.keys_of), index

    def _check_numbers(self, names: Sequence[str]) -> None:
        """Checks that files named 1 of 3, 2 of 3 and 3 of 3 are all there."""
        found: dict[tuple[str, int], set[int]] = {}
        for name in names:
            if match := _NUMBERED.fullmatch(name):
                found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
        for (stem, count), numbers in found.items():
            if len(numbers) != count or max(numbers) > count:
                raise FormatError(
                    f"{self.location} has {len(numbers)} of {count} files {stem}-*-of-*{_SUFFIX}, and no "
                    "index: restore the missing ones",
                    file=self.location,
                )

    def _header(self, name: str, index: HfIndex | None) -> SafetensorsHeader:
        try:
            return read_safetensors_header(self.storage, name, may_be_cut=True)
        except StorageError as error:
            if not error.details.get("missing") or index is None:
                raise
            path = f"{self.storage.location}/{name}"
            raise StorageError(
                f"{path} is missing. {index.path} names it: restore it from a copy", file=path, missing=True
            ) from error

    def _add(self, name: str, header: SafetensorsHeader, index: HfIndex | None) -> None:
        found = describe_safetensors(header)
        if index is not None:
            index.check(name, [*found, *header.unreadable])
        if doubles := {*found, *header.unreadable} & {*self.tensors, *self.unreadable}:
            key = min(doubles)
            raise self.fault(name, f"{key} is in another file too: name the one file to read", key=key)
        self.tensors |= found
        self.unreadable |= header.unreadable
        self._sizes[name] = header.data_end
        self.note_cut(name, header.size, header.data_end)
        self._tensor_bytes += header.data_end - header.data_start
        self.user_metadata = {**header.metadata, **self.user_metadata}

    def _read_embedded(self, file: str) -> EmbeddedValues:
        """The values that shardproof stored beside the tensors. The other texts are the user's metadata."""
        texts = {key: text for key, text in self.user_metadata.items() if key.startswith(PREFIX)}
        try:
            members = {key: json.loads(text) for key, text in texts.items()}
        except (ValueError, RecursionError) as error:
            raise self.fault(file, f"the texts {', '.join(texts)} are not JSON ({error})") from error
        embedded = EmbeddedValues.of(
            members, self.tensors, self.unreadable, lambda text: self.fault(file, text)
        )
        self.aliases = dict(embedded.aliases)
        self.unreadable |= embedded.unreadable
        others = {key: text for key, text in self.user_metadata.items() if key not in texts}
        self.step, self.user_metadata = embedded.step, {**others, **embedded.metadata}
        return embedded

    def _note_unread(self, names: Iterable[str]) -> None:
        if unread := sorted(names):
            self.notes.append(f"Not read, because they are not part of it: {', '.join(unread[:5])}.")

    def _note_config(self, foreign: Foreign) -> None:
        if foreign.has("adapter_config.json"):
            self.notes.append("It is an adapter: it does not have the weights of its base model.")
        if not foreign.has("config.json"):
            return
        try:
            _, config = read_json(self.storage, "config.json")
        except FormatError as error:
            self.notes.append(f"{error.message}.")
            return
        ties = config.get("tie_word_embeddings") is True
        if ties and not any(key.endswith("lm_head.weight") for key in self.tensors):
            self.notes.append(
                "config.json ties the output layer to the embedding: the file has only the embedding, and no "
                "key lm_head.weight."
            )


class _Saved(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    saved_offsets: tuple[int, ...]


_DECODER = msgspec.json.Decoder(dict[str, _Saved])


class DcpSafetensorsReader(FormatReader):
    """Sharded safetensors of torch's DCP, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from shardproof.storage import LocalStorage
        >>> path = tempfile.mkdtemp()
        >>> writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        >>> _ = dcp.save({"weight": torch.arange(6.0).reshape(3, 2)}, storage_writer=writer)
        >>> reader = DcpSafetensorsReader(Foreign(LocalStorage(path)))
        >>> reader.tensors["weight"].shape
        (3, 2)
    """

    name = "dcp_safetensors"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        names = _shards(foreign)
        if not names:
            raise NotCommittedError(
                f"{self.location} has no files shard-*-model-*-of-*.safetensors", file=self.location
            )
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._boxes: dict[str, list[StoredBox]] = {}
        self._dtypes: dict[str, str] = {}
        digest = xxhash.xxh3_128()
        for name in names:
            header = read_safetensors_header(self.storage, name)
            digest.update(header.raw)
            self._add(name, header)
        self.identity = digest.hexdigest()
        self.tensors = {
            key: TensorDescription(
                self._dtypes[key], shape, sorted(self._boxes[key], key=attrgetter("offsets"))
            )
            for key, shape in self._shapes.items()
        }
        ranks = {int(match[1]) for match in map(_NAME.fullmatch, names) if match}
        self.world_size = max(ranks)
        self.notes = [NO_CHECKSUMS, _LAST_RANK]
        if missing := sorted(set(range(1, self.world_size + 1)) - ranks):
            self.notes.append(
                f"There is no file of the ranks {', '.join(str(rank - 1) for rank in missing[:10])}: either "
                "they had nothing to write, or their files are lost and tensors with them."
            )

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True if the folder has shards that the writer names, and no metadata of DCP."""
        return foreign.file is None and not foreign.has(".metadata") and bool(_shards(foreign))

    def object_keys(self) -> Iterable[str]:
        """None: the writer drops values that are not tensors."""
        return ()

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """There are none; see `FormatReader.object`."""
        raise KeyError(key)

    def _add(self, name: str, header: SafetensorsHeader) -> None:
        """Adds the boxes of a file."""
        text = header.metadata.get(_OFFSETS)
        if text is None:
            raise self.fault(
                name, f"it has no {_OFFSETS} in its __metadata__, so the offsets of its tensors are unknown"
            )
        saved = decode_strictly(_DECODER, text.encode(), f"{self.location}/{name}, {_OFFSETS}")
        self.unreadable |= header.unreadable
        for key, tensor in header.tensors.items():
            if key not in saved:
                raise self.fault(name, f"{_OFFSETS} does not say where {key} lies", key=key)
            offsets, sizes = saved[key].saved_offsets, tensor.shape
            if len(offsets) != len(sizes) or any(not 0 <= offset < 2**62 for offset in offsets):
                raise self.fault(
                    name, f"{key} of shape {sizes} lies at {offsets}, which is not a valid offset", key=key
                )
            ends = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
            known = self._shapes.get(key, ends)
            if len(known) != len(ends) or self._dtypes.get(key, tensor.dtype) != tensor.dtype:
                raise self.fault(
                    name,
                    f"{key} has dtype {tensor.dtype} and {len(ends)} dimensions, but in another file "
                    f"{self._dtypes[key]} and {len(known)}",
                    key=key,
                )
            self._shapes[key] = tuple(map(max, known, ends))
            self._dtypes[key] = tensor.dtype
            boxes = self._boxes.setdefault(key, [])
            if 0 not in sizes:
                boxes.append(StoredBox.of(offsets, sizes, StoredView.dense(sizes, header.extent(key))))


def _shards(foreign: Foreign) -> list[str]:
    return [name for name in foreign.storage.list() if _NAME.fullmatch(name)]
