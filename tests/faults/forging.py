"""Checkpoints whose digests are right and whose content is hostile: what a forger could write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardproof as sp
from shardproof.engine.format import (
    MANIFEST_NAME,
    bytes_digest,
    file_digest,
    parse_header,
    read_chunk_digests,
    read_index,
    read_manifest,
)
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faults.damage import resealed, save

__all__ = ["Forgery", "state"]

_DTYPES = {"I64": "<i8", "U64": "<u8"}


def state() -> dict[str, Any]:
    """The state that is saved and then forged."""
    return {
        "w": torch.arange(24.0).reshape(6, 4),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "blob": b"x" * 100,
        "plain": {"a": 1, "pair": (1, 2)},
    }


class Forgery:
    """A small checkpoint, taken apart. Change its parts, then `seal` it.

    Args:
        folder: where it is saved first, and written again.
        saved: whether `folder` already has the checkpoint to take apart.
    """

    def __init__(self, folder: Path, *, saved: bool = False) -> None:
        if not saved:
            save(folder, state(), 1, LocalRendezvous())
        self.folder = folder
        storage = LocalStorage(folder)
        manifest = read_manifest(storage)
        table = read_index(storage, manifest)
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_bytes())
        del self.manifest["digest"]
        self.text: Callable[[bytes], bytes] = lambda text: text
        """The last change to the text of the manifest, before it is sealed."""
        self.index_name = manifest.index.name
        self.columns: dict[str, Any] = {
            "tensor": table.tensor,
            "file": table.file,
            "byte_start": table.byte_start,
            "byte_count": table.byte_count,
            "digest_hi": table.digest[:, 0],
            "digest_lo": table.digest[:, 1],
            "box_start": table.box_start,
            "box_offsets": table.box_offsets,
            "box_sizes": table.box_sizes,
        }
        self.columns = {name: np.array(column) for name, column in self.columns.items()}
        self.index: Callable[[bytes], bytes] = lambda data: data
        """The last change to the bytes of the index, before they are hashed."""
        self.shard_name = manifest.files[0].name
        self.shard = (folder / self.shard_name).read_bytes()

    def chunks_of(self, key: str) -> Any:
        """Rows of the chunks of a tensor."""
        row = [record[0] for record in self.manifest["tensors"]].index(key)
        return np.flatnonzero(self.columns["tensor"] == row)

    def drop_chunk(self, row: int) -> None:
        """Removes a row of the index."""
        starts = self.columns["box_start"]
        span = np.arange(starts[row], starts[row + 1])
        for name in ("box_offsets", "box_sizes"):
            self.columns[name] = np.delete(self.columns[name], span)
        self.columns["box_start"] = np.append(starts[: row + 1], starts[row + 2 :] - len(span))
        for name in ("tensor", "file", "byte_start", "byte_count", "digest_hi", "digest_lo"):
            self.columns[name] = np.delete(self.columns[name], row)

    def change_header(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the JSON of the shard's header; data stay where they are in the file if it still fits."""
        length = int.from_bytes(self.shard[:8], "little")
        header = json.loads(self.shard[8 : 8 + length])
        change(header)
        self.header_text(json.dumps(header, separators=(",", ":")).encode())
        self.shard = resealed(self.shard)

    def header_before(self) -> bytes:
        """The text of the shard's header, without padding."""
        return self.shard[8 : 8 + int.from_bytes(self.shard[:8], "little")].rstrip()

    def header_text(self, text: bytes) -> None:
        """Gives the shard this text as its header."""
        length = int.from_bytes(self.shard[:8], "little")
        padded = text.ljust(length)
        self.shard = len(padded).to_bytes(8, "little") + padded + self.shard[8 + length :]

    def declare(self, **more: Any) -> None:
        """Changes what the shard's header declares about its save."""

        def change(header: dict[str, Any]) -> None:
            declared = json.loads(header["__metadata__"]["shardproof"]) | more
            header["__metadata__"]["shardproof"] = json.dumps(declared)

        self.change_header(change)

    def seal(self) -> None:
        """Writes all files, each digest as if shardproof had written them."""
        shard = self.folder / self.shard_name
        shard.write_bytes(self.shard)
        try:
            header = parse_header(self.shard, len(self.shard), "shard")
            digests = read_chunk_digests(LocalStorage(self.folder), self.shard_name, header)
        except sp.ShardproofError:
            header = None
        files = self.manifest.get("files")
        for record in files if isinstance(files, list) else ():
            is_record = isinstance(record, list) and len(record) > 2
            if header is not None and is_record and record[:2] == [self.shard_name, len(self.shard)]:
                record[2] = file_digest(header.raw, digests)
        index = self.index(self._index())
        (self.folder / self.index_name).write_bytes(index)
        record = self.manifest.get("index")
        if isinstance(record, list) and len(record) == 5:
            record[1:3] = [len(index), bytes_digest(index)]
        text = self.text(json.dumps(self.manifest, separators=(",", ":")).encode())
        body = text.rstrip()[:-1]
        sealed = body + b',"digest":"' + bytes_digest(body).encode() + b'"}\n'
        (self.folder / MANIFEST_NAME).write_bytes(sealed)

    def _index(self) -> bytes:
        entries: dict[str, Any] = {"__metadata__": {"shardproof": "{}"}}
        data = b""
        for name, column in self.columns.items():
            code = "U64" if name.startswith("digest") else "I64"
            raw = np.asarray(column).astype(_DTYPES[code]).tobytes()
            entries[name] = {
                "dtype": code,
                "shape": [len(raw) // 8],
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
        return len(text).to_bytes(8, "little") + text + data

    def replace_in_manifest(self, pattern: str, replacement: str) -> None:
        """Replaces a part of the manifest's text; it has to be there."""

        def change(text: bytes) -> bytes:
            changed, count = re.subn(pattern.encode(), lambda found: replacement.encode(), text, count=1)
            assert count == 1, (pattern, text)
            return changed

        self.text = change
