"""The caller's request of a save, and the report of it to the coordinator."""

from __future__ import annotations

import operator
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardproof._utils.arguments import check_boolean, check_mapping
from shardproof.engine.format import PROVENANCE, newest_step
from shardproof.engine.saving.cache import SaveCache
from shardproof.engine.saving.incremental import FindBase
from shardproof.engine.saving.messages import RankReport
from shardproof.engine.saving.replica_check import CheckReplicas
from shardproof.engine.saving.save_option import SaveOption
from shardproof.engine.state import canonical_json, encode_plain
from shardproof.engine.storage import Storage
from shardproof.errors import ShardproofError, StructureError

_LATEST_STEP = 10**18


def refuse_run(storage: Storage) -> None:
    """Refuses the folder of a run as the place of a single checkpoint, as `SaveRequest.check_place`.

    Commands and a `Checkpointer` would take the checkpoint and the steps in the folder for different things.

    Raises:
        StructureError: the folder has a committed step.
        StorageError: the storage cannot list the folder.
    """
    if (newest := newest_step(storage)) is not None:
        raise StructureError(
            f"{storage.location} is the folder of a run, with {newest}, and takes no checkpoint beside its "
            f"steps. Save a step of the run with Checkpointer({storage.location!r}).save(step, state), or "
            "pass another folder",
            path=storage.location,
        )


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The caller's request, without the state. It must be the same on all ranks."""

    step: Any = None
    """Stored in the manifest."""
    metadata: dict[str, Any] | None = None
    """Stored in the manifest."""
    overwrite: bool = False
    """True to replace a committed checkpoint."""
    base: FindBase | None = None
    """Finds an earlier committed step in a sibling folder of the storage. Its chunks are not written again.
    Called on the coordinator. None: all chunks are written."""
    full_every: int | None = None
    """At least one of this many saves in a row with a `base` is written in full. None: no bound."""
    check_replicas: CheckReplicas | None = None
    """``"all"`` or ``"sample"`` to compare the bytes of boxes that several ranks have. A sample has
    `sample_bytes` a rank, and successive saves cover all boxes. Differences are in `SaveResult.diverged`, and
    logged. Some tensors differ by design, such as the statistics of an unsynchronised BatchNorm: omit them,
    or wrap them in `PerRank`."""
    check_place: Callable[[], None] | None = None
    """Raises a `ShardproofError` if the place cannot take a save. Called on the coordinator. None: any place
    can."""
    record_overwrite: bool = False
    """True if the save may replace earlier saves of its step on other tiers. The name of its attempt records
    this (see `shardproof.engine.format.overwrite_attempt`)."""
    on_commit: Callable[[], None] | None = None
    """Called on the coordinator after the commit and before any rank gets the result. So when
    `PendingSave.done` is true on any rank, this function has returned. If it fails, all ranks get the error,
    and the checkpoint stays committed. None: nothing."""


def report_rank(
    request: SaveRequest,
    options: Sequence[SaveOption],
    cache: SaveCache,
    digest: bytes,
    failed: ShardproofError | None,
) -> RankReport:
    """A rank's report, without the space that it sees.

    `failed` is the error of the previous save, if this rank's caller has not received it.

    Raises:
        StructureError: the step or an option is invalid, or the metadata have shardproof's own key.
        TypeError: the metadata or `overwrite` have a wrong type.
        PlainDataError: the metadata are not plain data.
    """
    check_mapping("metadata", request.metadata, "a dict of plain data, or None")
    check_boolean("overwrite", request.overwrite)
    if PROVENANCE in (request.metadata or ()):
        raise StructureError(
            f"metadata has the key {PROVENANCE!r}, which belongs to shardproof: rename it", key=PROVENANCE
        )
    step: Any = request.step
    if step is not None:
        is_index = not isinstance(step, bool) and hasattr(step, "__index__")
        if not is_index or not 0 <= operator.index(step) < _LATEST_STEP:
            raise StructureError(f"step is {step!r}, not an int from 0 to 10**18 - 1")
        step = operator.index(step)
    return RankReport(
        digest,
        cache.plan.id if cache.plan else "",
        step,
        canonical_json(encode_plain({} if request.metadata is None else request.metadata, "metadata")),
        request.overwrite,
        {option.name: option.report() for option in options},
        zlib.crc32(socket.gethostname().encode()),
        msgspec.json.encode(failed.to_wire()) if failed is not None else b"",
    )
