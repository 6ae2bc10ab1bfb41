"""Writing checkpoints."""

from __future__ import annotations

from typing import Any

from shardproof.rendezvous import Rendezvous, connected
from shardproof.saving.background import Workers
from shardproof.saving.commit import chunk_table, publish, write_index
from shardproof.saving.pending import PendingSave
from shardproof.saving.prepare import Attempt, PreparedShard, encode_chunks
from shardproof.saving.replicas import CheckReplicas
from shardproof.saving.result import Divergence, SaveResult
from shardproof.saving.saver import Saver, WhenBusy
from shardproof.state import open_all
from shardproof.storage import LocalStorage, StrOrBytesPath

__all__ = [
    "Attempt",
    "CheckReplicas",
    "Divergence",
    "PendingSave",
    "PreparedShard",
    "SaveResult",
    "Saver",
    "WhenBusy",
    "Workers",
    "chunk_table",
    "encode_chunks",
    "open_all",
    "publish",
    "save",
    "write_index",
]


def save(
    path: StrOrBytesPath,
    state: Any,
    *,
    step: int | None = None,
    metadata: dict[str, Any] | None = None,
    overwrite: bool = False,
    check_replicas: CheckReplicas | None = None,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
) -> SaveResult:
    """Saves a state tree and returns once it is committed: durable, whole and proved. Called by every rank.

    Args:
        path: the folder of the checkpoint.
        state: nested dicts, lists and tuples of tensors, modules, optimizers, objects with ``state_dict``,
            plain values.
        step: kept in the manifest.
        metadata: plain data, kept in the manifest.
        overwrite: whether to replace a committed checkpoint; it stays valid until the new one is committed.
        check_replicas: whether ranks that hold the same boxes compare their bytes, ``"all"`` of them or a
            ``"sample"``; what differs is in the result's `diverged`, and logged.
        rendezvous: where the ranks meet; found by itself when None.
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`, in this call. It
            bounds each wait for another rank, and the time to reach the store. It does not bound the call as
            a whole: a rank that reports progress is waited for. None: the deadline of the rendezvous (300 s
            unless set). Not together with `rendezvous`, which has its own.

    Returns:
        What was committed.

    Raises:
        ValueError: `deadline` is not positive, or `rendezvous` is given, too.
        AlreadyCommittedError: a checkpoint is committed here and `overwrite` is False.
        StructureError, TilingError, PlainDataError: the state cannot be kept; nothing was written.
        RankFailure, RankSilent: some rank failed or fell silent; nothing was committed, unless the text says
            so or it was the coordinator, which may have published.
        StorageError: the storage failed.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> committed = sp.save(tempfile.mkdtemp() + "/ckpt", {"w": torch.ones(2)}, step=7, deadline=60.0)
        >>> committed.step, committed.tensors
        (7, 1)
    """
    with connected(rendezvous, deadline) as meetings:
        return Saver(meetings).save(
            LocalStorage(path),
            state,
            step=step,
            metadata=metadata,
            overwrite=overwrite,
            check_replicas=check_replicas,
        )
