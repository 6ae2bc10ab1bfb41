"""What a peer must read: the tensors and objects of a golden checkpoint, bit for bit, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import shardproof as sp
from tests.interop.peer import PeerResult, assert_same_tensors
from tests.unit.formats.peers import Golden

__all__ = ["assert_reads", "converted", "expected_objects", "expected_tensors", "unordered"]


def expected_tensors(golden: Golden) -> dict[str, torch.Tensor]:
    """The tensors by key."""
    return {key: golden.tensor(key) for key in golden.kinds}


def expected_objects(golden: Golden) -> dict[str, Any]:
    """The objects as the peer gives them; `golden.objects` has them as shardproof reads them."""
    content: dict[str, Any] = json.loads((golden.checkpoint.parent / "expected.json").read_text())
    return dict(content["objects"])


def assert_reads(read: PeerResult, golden: Golden) -> None:
    """The peer found every tensor, bit for bit, and every object, and nothing else."""
    assert_same_tensors(read.tensors, expected_tensors(golden))
    expected = {key: unordered(value) for key, value in expected_objects(golden).items()}
    assert {key: unordered(value) for key, value in read.objects.items()} == expected


def unordered(value: Any) -> Any:
    """An encoded object with sorted dicts and attributes. shardproof sorts them too."""
    match value:
        case {"$": "dict" | "object", "v": list(pairs)}:
            return value | {"v": sorted((unordered(pair) for pair in pairs), key=json.dumps)}
        case {"$": _, "v": list(items)}:
            return value | {"v": [unordered(item) for item in items]}
        case list():
            return [unordered(item) for item in value]
    return value


def converted(source: Path, to: str, folder: Path, *, exclude: str | None = None, **options: Any) -> Path:
    """A checkpoint in another format, by way of shardproof's own.

    Args:
        source: of any format.
        to: name of the format.
        folder: in which both are made.
        exclude: pattern of the keys to leave out.
        options: of the second conversion.
    """
    sp.convert(source, folder / "shardproof", to="shardproof", exclude=exclude)
    sp.convert(folder / "shardproof", folder / to, to=to, **options)
    return folder / to
