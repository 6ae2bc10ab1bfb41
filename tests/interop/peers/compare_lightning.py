"""Compares checkpoints, read by our `CheckpointIO`, bit for bit: `compare_lightning.py BUT A B...`.

BUT names the parts to leave out, with commas between. Prints how many tensors are equal.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardproof.frameworks.lightning import ShardproofCheckpointIO


def values(path: str, but: list[str]) -> dict[str, Any]:
    checkpoint = ShardproofCheckpointIO().load_checkpoint(path, map_location="cpu", weights_only=False)
    parts = {key: value for key, value in checkpoint.items() if key not in but}
    return {keystr(place): value for place, value in tree_flatten_with_path(parts)[0]}


def main() -> None:
    but, first, *others = sys.argv[1:]
    expected = values(first, but.split(","))
    for path in others:
        found = values(path, but.split(","))
        assert found.keys() == expected.keys(), (path, found.keys() ^ expected.keys())
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == found[key].dtype and torch.equal(value, found[key]), (path, key)
            else:
                assert value == found[key], (path, key, value, found[key])
    print("equal:", sum(isinstance(value, torch.Tensor) for value in expected.values()), "tensors")


if __name__ == "__main__":
    main()
