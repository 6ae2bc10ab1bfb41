"""The steps of a run: save, restore, retention, prune. `Checkpointer` loads torch when first used.

These are the public names of `shardproof.runs.checkpointer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.runs.checkpointer import __all__ as __all__

if TYPE_CHECKING:
    from shardproof.runs.checkpointer import *  # noqa: F403

    # The package loads these when they are first used. The tool that makes the reference omits them from `*`.
    from shardproof.runs.checkpointer import Checkpointer as Checkpointer
    from shardproof.runs.checkpointer import PassedOver as PassedOver
    from shardproof.runs.checkpointer import RestoredStep as RestoredStep


def __getattr__(name: str) -> Any:
    """A public name. Some of them are loaded when they are first used."""
    from shardproof.runs import checkpointer

    if name in __all__:
        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
