"""The coordinator's choice of the base: the earlier step that an incremental save refers to.

The ranks cache the digests of the last step that they committed, and the coordinator caches the positions of
its chunks. While plan and step are unchanged, the next save uses these caches. Otherwise the coordinator
reads the index of the base and sends each rank the digests of its chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardproof.engine.format import (
    chain_length,
    has_no_references,
    read_index,
    read_manifest,
    read_seal,
)
from shardproof.engine.planning import WritePlan
from shardproof.engine.saving.incremental.base_chunks import Base, match_base, no_base
from shardproof.engine.storage import Storage, file_sizes
from shardproof.errors import FormatError, NotCommittedError, StorageError

FindBase = Callable[[], Storage | None]
"""Finds the base, in a sibling folder of the new step; None: there is no base."""

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True, eq=False)
class CachedBase:
    """The coordinator's cache of the last save."""

    attempt: str
    """Attempt of the last save. A rank that reports it has the digests of its chunks cached."""
    plan: str
    """Id of the plan of that save."""
    base: Base


class BaseChoice:
    """The base of one save, which `find` finds. Without `find`, all chunks are written.

    Note "Chains end": a step that refers to its base shares bytes with it, and damage to these bytes damages
    both. So when a chain has the length that the caller allows, the next save is written in full and starts a
    new chain. The attempt of each save contains the length of its chain, so the bound holds across restarts
    and does not depend on what retention removes. A save that replaces a step without references is written
    in full, too: references must not replace an independent copy.
    """

    def __init__(self, storage: Storage, find: FindBase | None, cached: CachedBase | None) -> None:
        self.base: Base | None = None
        """The planned chunks in the base, once `use_cached` or `look_up` has found them."""
        self._storage = storage
        self._cached = cached
        self._found = find() if find is not None else None
        self.length = 0
        """Saves since the last full save, including this one; see `bound_chain`."""

    @property
    def folder(self) -> str:
        """Folder of the base; empty without a base."""
        return self._found.folder if self._found is not None else ""

    def use_cached(self, attempts: Sequence[str]) -> bool:
        """Uses the cached base, if the step and the caches of all ranks still match it.

        `attempts` are those whose digests the ranks have cached.

        Raises:
            StorageError: the storage failed.
        """
        if (
            self._found is None
            or self._cached is None
            or any(one != self._cached.attempt for one in attempts)
        ):
            return False
        base = self._cached.base
        if base.folder != self.folder or base.seal != read_seal(self._found) or self._lost(base):
            return False
        self.base = base
        return True

    def bound_chain(self, full_every: int | None) -> None:
        """Drops the base if the save has to be written in full (note "Chains end").

        At least one of `full_every` saves in a row is written in full; None: no bound.

        Raises:
            StorageError: the storage failed.
        """
        if self._found is None:
            return
        before = self._length_before(self._found)
        self.length = 1 if before is None else before + 1
        is_due = full_every is not None and (before is None or self.length >= full_every)
        if is_due or has_no_references(self._storage):
            self._found = self.base = None

    def _length_before(self, found: Storage) -> int | None:
        """Length of the chain that ends with the base; None if it is unknown."""
        if self.base is not None:
            assert self._cached is not None
            has_references = any(record.folder != found.folder for record in self.base.files)
            return chain_length(self._cached.attempt) if has_references else 0
        try:
            manifest = read_manifest(found)
        except (FormatError, NotCommittedError):
            return 0  # `look_up` finds no chunks there
        return chain_length(manifest.attempt) if manifest.referenced_files else 0

    def look_up(self, plan: WritePlan) -> Base:
        """Finds the planned chunks in the base; a base that cannot be read stores none of them."""
        assert self._found is not None
        try:
            manifest, seal = read_manifest(self._found), read_seal(self._found) or b""
            found = match_base(plan, manifest, read_index(self._found, manifest), self.folder, seal)
            self.base = found.without(self._lost(found), self._storage.folder)
        except (FormatError, NotCommittedError, StorageError) as error:
            _log.warning(
                "%s: all chunks are written, because the base cannot be read: %s",
                self._storage.location,
                error,
            )
            self.base = no_base(plan, self.folder)
        return self.base

    def _lost(self, base: Base) -> list[int]:
        """Rows of the base's files whose size differs from the recorded one."""
        files = [(self._storage.sibling(record.folder), record.name) for record in base.files]
        return [
            row
            for row, (record, found) in enumerate(zip(base.files, file_sizes(files), strict=True))
            if found != record.size
        ]
