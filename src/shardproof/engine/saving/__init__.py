"""Saves: the save of one state (`save`), and a saver that caches between saves (`Saver`).

`save_protocol.py` has the protocol of a save, as a list of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from shardproof.engine.rendezvous import Rendezvous, connected
from shardproof.engine.saving.background import PendingSave, Workers
from shardproof.engine.saving.background import Progress as Progress  # not listed in __all__: internal
from shardproof.engine.saving.background import unfinished as unfinished
from shardproof.engine.saving.background import wait_while_moving as wait_while_moving
from shardproof.engine.saving.commit import Unconfirmed as Unconfirmed
from shardproof.engine.saving.messages import Attempt, Divergence, SaveResult
from shardproof.engine.saving.replica_check import CheckReplicas
from shardproof.engine.saving.save_request import SaveRequest as SaveRequest
from shardproof.engine.saving.save_request import refuse_run as refuse_run
from shardproof.engine.saving.saver import Saver, WhenBusy
from shardproof.engine.state import open_all
from shardproof.engine.storage import Location, check_location, storage_at

__all__ = [
    "Attempt",
    "CheckReplicas",
    "Divergence",
    "PendingSave",
    "SaveResult",
    "Saver",
    "WhenBusy",
    "Workers",
    "open_all",
    "save",
]


def save(
    path: Location,
    state: Any,
    *,
    step: int | None = None,
    metadata: dict[str, Any] | None = None,
    overwrite: bool = False,
    check_replicas: CheckReplicas | None = None,
    provenance: bool = True,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveResult:
    """Saves a state tree and returns once it is committed. All ranks call it.

    Args:
        path: the folder of the checkpoint, or its URL, such as ``s3://bucket/run/step``.
        state: nested dicts, lists and tuples of tensors, modules, optimizers, objects with ``state_dict``,
            and plain values.
        step: stored in the manifest.
        metadata: plain data, stored in the manifest.
        overwrite: whether to replace a committed checkpoint. It stays valid until the new one is committed.
        check_replicas: ``"all"`` or ``"sample"`` to compare the bytes of boxes that several ranks have.
            Differences are in `SaveResult.diverged`, and logged.
        provenance: True to record the origin of the save in the manifest: the program and its arguments
            without secrets, the git commit, versions, hosts and meshes (docs/format.md). The environment
            variable SHARDPROOF_PROVENANCE=0 turns it off for all saves.
        rendezvous: the rendezvous of all ranks. None: the one that `shardproof.rendezvous.connect` finds.
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`. It bounds each
            wait for another rank, and the time to reach the store. It does not bound the whole call: the
            ranks wait for a rank that reports progress. None: the deadline of the rendezvous (default
            300 s). Cannot be combined with `rendezvous`, which has its own deadline.
        storage_options: settings of an object store; see `shardproof.storage.ObjectStorage`. None: those of
            the environment.

    Returns:
        The committed checkpoint.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `deadline` is not positive, or is given together with `rendezvous`.
        AlreadyCommittedError: `path` has a committed checkpoint and `overwrite` is False.
        StructureError, TilingError, PlainDataError: the state cannot be stored, or `path` is the folder of a
            run with committed steps; nothing was committed.
        RankFailure, RankSilent: a rank failed or fell silent. Nothing was committed, with two exceptions: the
            message says that it was, or the silent rank is the coordinator.
        StorageError: the storage failed.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> committed = sp.save(tempfile.mkdtemp() + "/ckpt", {"w": torch.ones(2)}, step=7, deadline=60.0)
        >>> committed.step, committed.tensors
        (7, 1)
    """
    check_location("path", path)
    with connected(rendezvous, deadline) as meetings:
        storage = storage_at(path, storage_options)
        return Saver(meetings, provenance=provenance).save(
            storage,
            state,
            step=step,
            metadata=metadata,
            overwrite=overwrite,
            check_replicas=check_replicas,
            check_place=partial(refuse_run, storage),
        )
