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

from shardproof.version import __version__ as __version__

if TYPE_CHECKING:
    from shardproof import events as events
    from shardproof import fsdp as fsdp
    from shardproof import geometry as geometry
    from shardproof import layouts as layouts
    from shardproof import optim as optim
    from shardproof import rendezvous as rendezvous
    from shardproof import rerun as rerun
    from shardproof import storage as storage
    from shardproof.engine.loading import Checkpoint as Checkpoint
    from shardproof.engine.loading import LoadReport as LoadReport
    from shardproof.engine.loading import StoredTensor as StoredTensor
    from shardproof.engine.loading import load as load
    from shardproof.engine.loading import open as open
    from shardproof.engine.saving import Divergence as Divergence
    from shardproof.engine.saving import PendingSave as PendingSave
    from shardproof.engine.saving import SaveResult as SaveResult
    from shardproof.engine.saving import save as save
    from shardproof.engine.state import FlatShard as FlatShard
    from shardproof.engine.state import LocalShards as LocalShards
    from shardproof.engine.state import OptimizerState as OptimizerState
    from shardproof.engine.state import PerRank as PerRank
    from shardproof.engine.state import RandomState as RandomState
    from shardproof.engine.state import register_dataclass as register_dataclass
    from shardproof.engine.state import register_enum as register_enum
    from shardproof.errors import AlreadyCommittedError as AlreadyCommittedError
    from shardproof.errors import CorruptChunkError as CorruptChunkError
    from shardproof.errors import FormatError as FormatError
    from shardproof.errors import KeyMismatchError as KeyMismatchError
    from shardproof.errors import NoSpaceError as NoSpaceError
    from shardproof.errors import NotCommittedError as NotCommittedError
    from shardproof.errors import PlainDataError as PlainDataError
    from shardproof.errors import RankFailure as RankFailure
    from shardproof.errors import RankSilent as RankSilent
    from shardproof.errors import ReentrantCallError as ReentrantCallError
    from shardproof.errors import SaveSkipped as SaveSkipped
    from shardproof.errors import ShardproofError as ShardproofError
    from shardproof.errors import StorageError as StorageError
    from shardproof.errors import StructureError as StructureError
    from shardproof.errors import TilingError as TilingError
    from shardproof.formats.conversion import ConversionReport as ConversionReport
    from shardproof.formats.conversion import MappedTensor as MappedTensor
    from shardproof.formats.conversion import Move as Move
    from shardproof.formats.conversion import convert as convert
    from shardproof.runs.checkpointer import Checkpointer as Checkpointer
    from shardproof.runs.checkpointer import Damage as Damage
    from shardproof.runs.checkpointer import Every as Every
    from shardproof.runs.checkpointer import Incremental as Incremental
    from shardproof.runs.checkpointer import KeepAll as KeepAll
    from shardproof.runs.checkpointer import KeepBest as KeepBest
    from shardproof.runs.checkpointer import KeepEvery as KeepEvery
    from shardproof.runs.checkpointer import KeepLatest as KeepLatest
    from shardproof.runs.checkpointer import NodeLocal as NodeLocal
    from shardproof.runs.checkpointer import PassedOver as PassedOver
    from shardproof.runs.checkpointer import Pin as Pin
    from shardproof.runs.checkpointer import Preempted as Preempted
    from shardproof.runs.checkpointer import Preemption as Preemption
    from shardproof.runs.checkpointer import RestoredStep as RestoredStep
    from shardproof.runs.checkpointer import Retention as Retention
    from shardproof.runs.checkpointer import RetentionPolicy as RetentionPolicy
    from shardproof.runs.checkpointer import SavedStep as SavedStep
    from shardproof.runs.checkpointer import Schedule as Schedule
    from shardproof.runs.checkpointer import SecondTier as SecondTier
    from shardproof.runs.checkpointer import StepFolder as StepFolder

_PACKAGES = ("events", "fsdp", "geometry", "layouts", "optim", "rendezvous", "rerun", "storage")
"""Packages that are public as they are."""

_HOMES = {
    "runs.checkpointer": (
        "Checkpointer",
        "Damage",
        "Every",
        "Incremental",
        "KeepAll",
        "KeepBest",
        "KeepEvery",
        "KeepLatest",
        "NodeLocal",
        "PassedOver",
        "Pin",
        "Preempted",
        "Preemption",
        "RestoredStep",
        "Retention",
        "RetentionPolicy",
        "SavedStep",
        "Schedule",
        "SecondTier",
        "StepFolder",
    ),
    "formats.conversion": ("ConversionReport", "MappedTensor", "Move", "convert"),
    "errors": (
        "AlreadyCommittedError",
        "CorruptChunkError",
        "FormatError",
        "KeyMismatchError",
        "NoSpaceError",
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
    "engine.loading": ("Checkpoint", "LoadReport", "StoredTensor", "load", "open"),
    "engine.saving": ("SaveResult", "Divergence", "PendingSave", "save"),
    "engine.state": (
        "FlatShard",
        "LocalShards",
        "OptimizerState",
        "PerRank",
        "RandomState",
        "register_dataclass",
        "register_enum",
    ),
}
"""Public names by the module that they come from. The imports above say the same to type checkers."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(["__version__", *_PACKAGES, *_HOME_OF])


def __getattr__(name: str) -> Any:
    """The public name, loaded from its home and kept for the next use (PEP 562)."""
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f"shardproof.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardproof' has no attribute {name!r}")
    value = getattr(import_module(f"shardproof.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
