"""Writing checkpoints."""

from __future__ import annotations

from typing import Any

from shardproof.rendezvous import Rendezvous, connect
from shardproof.saving.background import Workers
from shardproof.saving.committed import Committed, Divergence
from shardproof.saving.pending import PendingSave
from shardproof.saving.repair import repair
from shardproof.saving.replicas import CheckReplicas
from shardproof.saving.saver import Saver, WhenBusy
from shardproof.saving.standalone import make_standalone
from shardproof.state import open_all
from shardproof.storage import LocalStorage, StrOrBytesPath

__all__ = [
    "CheckReplicas",
    "Committed",
    "Divergence",
    "PendingSave",
    "Saver",
    "WhenBusy",
    "Workers",
    "make_standalone",
    "open_all",
    "repair",
    "save",
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
) -> Committed:
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

    Raises:
        AlreadyCommittedError: a checkpoint is committed here and `overwrite` is False.
        StructureError, TilingError, PlainDataError: the state cannot be kept; nothing was written.
        RankFailure, RankSilent: some rank failed or fell silent; nothing was committed, unless the text says
            so or it was the leader, which may have published.
        StorageError: the storage failed.

    >>> import shardproof as sp, tempfile, torch
    >>> committed = sp.save(tempfile.mkdtemp() + "/ckpt", {"w": torch.ones(2)}, step=7)
    >>> committed.step, committed.tensors
    (7, 1)
    """
    saver = Saver(rendezvous or connect())
    return saver.save(
        LocalStorage(path),
        state,
        step=step,
        metadata=metadata,
        overwrite=overwrite,
        check_replicas=check_replicas,
    )
