"""Two storage tiers of one run: uploads from the first to the second, and reads from the nearest copy.

Read `uploader.py` for the uploads, and `tiered_run.py` for the reads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardproof.runs.checkpointer.run_options import check_node_local, open_tiers
from shardproof.runs.checkpointer.tiers.tiered_run import Copies, NearerCopy, TieredRun, copies_in
from shardproof.runs.checkpointer.tiers.upload_messages import UploadRequest

if TYPE_CHECKING:
    from shardproof.runs.checkpointer.tiers.uploader import Uploader

__all__ = [
    "Copies",
    "NearerCopy",
    "TieredRun",
    "UploadRequest",
    "Uploader",
    "check_node_local",
    "copies_in",
    "open_tiers",
]


def __getattr__(name: str) -> Any:
    if name == "Uploader":  # needs torch, and the choice of a step does not
        return importlib.import_module(f"{__name__}.uploader").Uploader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
