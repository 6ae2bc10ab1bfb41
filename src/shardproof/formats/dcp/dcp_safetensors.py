"""Reads the shards of safetensors that torch's ``HuggingFaceStorageWriter`` writes, one or more a rank.

Each file gives the boxes of its tensors in ``__metadata__``, under ``DCP_SHARDING_INFO``. No file gives the
global shapes, so the size of a dimension is the largest end of a box in it. The same writer also makes
consolidated files. These are ordinary files of Hugging Face, which `SafetensorsReader` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import msgspec
import xxhash

from shardproof.engine.foreign import Foreign, FormatReader, StoredBox, StoredView, TensorDescription
from shardproof.engine.format import decode_strictly
from shardproof.errors import NotCommittedError
from shardproof.formats.safetensors_files import (
    NO_CHECKSUMS,
    SafetensorsHeader,
    read_safetensors_header,
)

_NAME = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
_OFFSETS = "DCP_SHARDING_INFO"
_LAST_RANK = (
    "The format records no global shapes and no number of ranks: if the files of the last ranks are missing, "
    "tensors look shorter than they were saved."
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
