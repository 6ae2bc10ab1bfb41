"""The list of all ways, and the errors of those that cannot be imported."""

from __future__ import annotations

import importlib
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from peers.way import Way

ROSTER = {
    "ours": ("Shardproof", "ShardproofFence", "ShardproofStage"),
    "torch_dcp": ("TorchDcp", "TorchDcpThread", "TorchDcpThreadBackgroundStage", "TorchDcpProcess"),
    "megatron": ("Megatron", "MegatronFullyParallel", "MegatronAsync"),
    "meta": ("TorchCheckpointing", "TorchCheckpointingProcess"),
    "byte": ("ByteCheckpoint", "ByteCheckpointFast"),
    "per_rank": ("TorchSave", "SafetensorsFile"),
    "tensor_store": ("TensorStore",),
    "orbax_jax": ("Orbax", "OrbaxAsync"),
}
"""Module to the names of its ways."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A peer that cannot be measured here."""

    name: str
    reason: str


def every_way(only: str | None = None) -> tuple[list[type[Way]], list[Missing]]:
    """Ways that can be imported, and the others with their errors.

    Args:
        only: names of classes or modules, separated by commas; None for all. If no way of shardproof is
            named, all of them are added, because every ratio is to shardproof.
    """
    wanted = None if only is None else {*only.split(",")}
    if wanted is not None and not wanted & {"ours", *ROSTER["ours"]}:
        wanted.add("ours")
    ways: list[type[Way]] = []
    missing: list[Missing] = []
    for module, names in ROSTER.items():
        chosen = [name for name in names if wanted is None or {module, name} & wanted]
        if not chosen:
            continue
        try:
            with redirect_stdout(sys.stderr):  # standard output is for the tables
                found = importlib.import_module(f"peers.{module}")
        except Exception as error:
            missing.append(Missing(module, f"{type(error).__name__}: {error}"))
            continue
        ways += [getattr(found, name) for name in chosen]
    return ways, missing
