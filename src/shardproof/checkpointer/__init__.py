"""The steps of a run. Retention needs no torch; `Checkpointer` does, and is loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.checkpointer.retention import KeepLatest, Retention

if TYPE_CHECKING:
    from shardproof.checkpointer.checkpointer import Checkpointer, PassedOver

__all__ = ["Checkpointer", "KeepLatest", "PassedOver", "Retention"]


def __getattr__(name: str) -> Any:
    if name in ("Checkpointer", "PassedOver"):
        from shardproof.checkpointer import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
