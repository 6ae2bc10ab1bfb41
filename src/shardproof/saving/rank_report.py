"""A rank's first report: the structure of its state, and the request of its caller."""

from __future__ import annotations

import operator
import socket
import zlib
from typing import Any

import msgspec

from shardproof._utils.arguments import check_boolean, check_mapping
from shardproof.errors import ShardproofError, StructureError
from shardproof.planning import Structure
from shardproof.saving.cache import CachedStructure, SaveCache
from shardproof.saving.messages import RankReport
from shardproof.saving.save_request import SaveRequest
from shardproof.state import Collected, canonical_json, encode_plain

__all__ = ["fits_cached_plan", "report_rank", "structure_of"]

_LATEST_STEP = 10**18


def structure_of(collected: Collected, cache: SaveCache) -> tuple[Structure, bytes]:
    """The structure of a state and its digest, from the cache if the structure has not changed."""
    cached = cache.structure
    objects = tuple([entry.key for entry in collected.objects])
    if cached is None or cached.token is not collected.token or cached.structure.objects != objects:
        structure = Structure.of(collected)
        cached = cache.structure = CachedStructure(collected.token, structure, structure.digest())
    return cached.structure, cached.digest


def fits_cached_plan(request: SaveRequest, cache: SaveCache, digest: bytes) -> bool:
    """True if this rank can reuse its cached plan, and its request needs no answer of the coordinator."""
    return not request.options and cache.plan is not None and cache.plan.digest == digest


def report_rank(
    request: SaveRequest, cache: SaveCache, digest: bytes, failed: ShardproofError | None
) -> RankReport:
    """A rank's report, without the space that it sees.

    `failed` is the error of the previous save, if this rank's caller has not received it.

    Raises:
        StructureError: the step or an option is invalid.
        TypeError: the metadata or `overwrite` have a wrong type.
        PlainDataError: the metadata are not plain data.
    """
    check_mapping("metadata", request.metadata, "a dict of plain data, or None")
    check_boolean("overwrite", request.overwrite)
    return RankReport(
        digest,
        cache.plan.id if cache.plan else "",
        _checked_step(request.step),
        canonical_json(encode_plain({} if request.metadata is None else request.metadata, "metadata")),
        request.overwrite,
        {option.name: option.report() for option in request.options},
        zlib.crc32(socket.gethostname().encode()),
        msgspec.json.encode(failed.to_wire()) if failed is not None else b"",
    )


def _checked_step(step: Any) -> int | None:
    if step is None:
        return None
    is_index = not isinstance(step, bool) and hasattr(step, "__index__")
    if not is_index or not 0 <= operator.index(step) < _LATEST_STEP:
        raise StructureError(f"step is {step!r}, not an int from 0 to 10**18 - 1")
    return operator.index(step)
