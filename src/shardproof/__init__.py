"""Checkpoints of large PyTorch runs: saved from any parallel layout, proved whole, loaded into any other.

The public names are loaded when they are first used, so that ``import shardproof`` costs next to nothing
and needs neither torch nor numpy.

>>> import tempfile, torch
>>> import shardproof as sp
>>> weight = torch.arange(6.0).reshape(2, 3)
>>> with tempfile.TemporaryDirectory() as folder:
...     committed = sp.save(f"{folder}/step", {"weight": weight})
...     target = {"weight": torch.zeros(2, 3)}
...     report = sp.load(f"{folder}/step", target)
>>> torch.equal(target["weight"], weight)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.version import __version__

if TYPE_CHECKING:
    from shardproof import events, rerun
    from shardproof.checkpointer import Checkpointer, KeepLatest
    from shardproof.errors import (
        AlreadyCommittedError,
        CorruptChunkError,
        FormatError,
        KeyMismatchError,
        NotCommittedError,
        PlainDataError,
        RankFailure,
        RankSilent,
        ReentrantCallError,
        SaveSkipped,
        ShardproofError,
        StorageError,
        StructureError,
        TilingError,
    )
    from shardproof.loading import LoadReport, load, open
    from shardproof.saving import Committed, Divergence, PendingSave, save
    from shardproof.state import (
        FlatShard,
        LocalShards,
        OptimizerState,
        PerRank,
        RandomState,
        register_dataclass,
        register_enum,
    )

__all__ = [
    "AlreadyCommittedError",
    "Checkpointer",
    "Committed",
    "CorruptChunkError",
    "Divergence",
    "FlatShard",
    "FormatError",
    "KeepLatest",
    "KeyMismatchError",
    "LoadReport",
    "LocalShards",
    "NotCommittedError",
    "OptimizerState",
    "PendingSave",
    "PerRank",
    "PlainDataError",
    "RandomState",
    "RankFailure",
    "RankSilent",
    "ReentrantCallError",
    "SaveSkipped",
    "ShardproofError",
    "StorageError",
    "StructureError",
    "TilingError",
    "__version__",
    "events",
    "load",
    "open",
    "register_dataclass",
    "register_enum",
    "rerun",
    "save",
]

_HOMES = {
    "checkpointer": ("Checkpointer", "KeepLatest"),
    "loading": ("LoadReport", "load", "open"),
    "saving": ("Committed", "Divergence", "PendingSave", "save"),
    "state": (
        "FlatShard",
        "OptimizerState",
        "PerRank",
        "RandomState",
        "LocalShards",
        "register_dataclass",
        "register_enum",
    ),
    "errors": (
        "AlreadyCommittedError",
        "CorruptChunkError",
        "FormatError",
        "KeyMismatchError",
        "NotCommittedError",
        "PlainDataError",
        "RankFailure",
        "RankSilent",
        "ReentrantCallError",
        "SaveSkipped",
        "ShardproofError",
        "StorageError",
        "StructureError",
        "TilingError",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The public name, loaded from its home and kept for the next use (PEP 562)."""
    from importlib import import_module

    if name == "ShardedTensor":
        import warnings

        warnings.warn(
            "shardproof.ShardedTensor is now shardproof.LocalShards, because torch has another class of the "
            "old name; use the new name, the class is the same",
            DeprecationWarning,
            stacklevel=2,
        )
        name = "LocalShards"
    if name in ("events", "rerun"):
        return import_module(f"shardproof.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardproof' has no attribute {name!r}")
    value = getattr(import_module(f"shardproof.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
