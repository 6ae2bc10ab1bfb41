"""Makes the restored step durable, or marks it as unconfirmed."""

from __future__ import annotations

import logging

from shardproof.checkpointer.nodes import MissingCopies, NodesView
from shardproof.checkpointer.open_run import OpenRun
from shardproof.checkpointer.step_folders import StepFolder
from shardproof.errors import StorageError
from shardproof.format import MANIFEST_NAME
from shardproof.storage import Storage

__all__ = ["confirm"]

_log = logging.getLogger("shardproof")


def confirm(
    run: OpenRun, view: Storage, folder: StepFolder, copies: MissingCopies | None, *, whole: bool
) -> list[bytes]:
    """Flushes the restored step. If the load read all of it, its commit is confirmed. Rank 0 calls it.

    Args:
        run: the run.
        view: the view of all tiers that the restore used.
        folder: folder of the step.
        copies: makes missing copies; None without nodes.
        whole: True if the load read all of the step.

    Returns:
        Each rank's share of the missing copies of the step; empty if no copy is missing.
    """
    storage = view.within(folder.name)
    shares: list[bytes] = []
    try:
        if run.nodes is not None and copies is not None and isinstance(storage, NodesView):
            text = run.nodes.confirm(storage)
            if text is not None:
                shares = copies.plan(folder.name, text, storage.choice.left_out)
        storage.flush(MANIFEST_NAME)
    except StorageError as error:
        if error.details.get("missing"):
            return []  # another process removed the step after it was read
        run.saver.unconfirmed.add(storage)
        _log.warning(
            "%s: %s was restored, and every byte that was read is verified, but it is not known to be "
            "durable: %s. No incremental save refers to it and retention does not count it until a restore "
            "can flush it or it is saved again",
            run.location,
            folder,
            error,
        )
    else:
        if whole:
            run.saver.unconfirmed.confirm(storage)
    return shares
