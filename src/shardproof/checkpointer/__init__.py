"""The steps of a run. Retention needs no torch; `Checkpointer` does, and is loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.checkpointer.damage import Damage
from shardproof.checkpointer.folders import StepFolder
from shardproof.checkpointer.retention import KeepLatest, Retention

if TYPE_CHECKING:
    from shardproof.checkpointer.checkpointer import Checkpointer
    from shardproof.checkpointer.choosing import PassedOver

__all__ = ["Checkpointer", "Damage", "KeepLatest", "PassedOver", "Retention", "StepFolder"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from shardproof.checkpointer.checkpointer import Checkpointer

        return Checkpointer
    if name == "PassedOver":
        from shardproof.checkpointer.choosing import PassedOver

        return PassedOver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
