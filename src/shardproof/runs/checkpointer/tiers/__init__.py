"""Two storage tiers of one run: uploads from the first to the second, and reads from the nearest copy.

Read `uploader.py` for the uploads, and `tiered_run.py` for the reads.
"""

from __future__ import annotations

from shardproof.runs.checkpointer.tiers.open_tiers import check_node_local, open_tiers
from shardproof.runs.checkpointer.tiers.tiered_run import Copies, NearerCopy, TieredRun, copies_in
from shardproof.runs.checkpointer.tiers.upload_messages import UploadRequest
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
