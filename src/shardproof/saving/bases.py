"""The coordinator's side of an incremental save: which earlier step it builds on, and who knows what of that step.

Ranks and coordinator keep what they know of the last step that they committed together. While plan and step are
the same, a save builds on it and nothing has to be read or sent; otherwise the coordinator reads the step's index
and tells each rank the digests of its chunks there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.format import chain_length, read_index, read_manifest, refers_to_none, seal_of
from shardproof.planning import WritePlan
from shardproof.saving.incremental import Base, match_base, no_base
from shardproof.storage import Storage

__all__ = ["BaseChoice", "FindBase", "KnownBase"]

FindBase = Callable[[], Storage | None]
"""Finds the earlier step that a save builds on, beside the new one; None: there is none."""

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True, eq=False)
class KnownBase:
    """What the coordinator keeps of the last save."""

    attempt: str
    """Of that save. A rank that names it knows the digests of its chunks there."""
    base: Base


class BaseChoice:
    """The step that one save builds on.

    Note "Chains end": a step that refers to its base shares bytes with it, and damage to these bytes takes
    both. So a save is written in full, and begins a chain of its own, when the chain has the length that the
    caller allows. The attempt of each save names the length of its chain, so the bound holds across restarts
    and whatever retention removes. A save that replaces a step without references is written in full, too:
    references must not take the place of an independent copy.

    Args:
        storage: of the new step.
        find: finds the step; None: everything is written.
        kept: of the save before.
    """

    def __init__(self, storage: Storage, find: FindBase | None, kept: KnownBase | None) -> None:
        self.base: Base | None = None
        """What the step has of the planned chunks, once that is known."""
        self._storage = storage
        self._kept = kept
        self._found = find() if find is not None else None
        self.length = 0
        """Saves since the last that was written in full, this one included; see `bound_chain`."""

    @property
    def folder(self) -> str:
        """Of the step; empty where there is none."""
        return self._found.folder if self._found is not None else ""

    def take_kept(self, known: Sequence[str]) -> bool:
        """Takes what is kept, if it is still true of the step and of all ranks.

        Args:
            known: the attempt whose digests each rank knows.

        Raises:
            StorageError: the storage cannot tell.
        """
        if self._found is None or self._kept is None or any(one != self._kept.attempt for one in known):
            return False
        base = self._kept.base
        if base.folder != self.folder or base.seal != seal_of(self._found) or self._lost(base):
            return False
        self.base = base
        return True

    def bound_chain(self, full_every: int | None) -> None:
        """Gives up the step if the save has to be written in full (note "Chains end").

        Args:
            full_every: of so many saves in a row, at least one is written in full; None: no bound.

        Raises:
            StorageError: the storage cannot tell.
        """
        if self._found is None:
            return
        before = self._length_before(self._found)
        self.length = 1 if before is None else before + 1
        is_due = full_every is not None and (before is None or self.length >= full_every)
        if is_due or refers_to_none(self._storage):
            self._found = self.base = None

    def _length_before(self, found: Storage) -> int | None:
        """Length of the chain that ends with the step; None if it is unknown."""
        if self.base is not None:
            assert self._kept is not None
            has_references = any(record.folder != found.folder for record in self.base.files)
            return chain_length(self._kept.attempt) if has_references else 0
        try:
            manifest = read_manifest(found)
        except (FormatError, NotCommittedError):
            return 0  # `look_up` finds no chunks there
        return chain_length(manifest.attempt) if manifest.borrowed_files else 0

    def look_up(self, plan: WritePlan) -> Base:
        """Finds the planned chunks in the step; one that cannot be read is as one that has none of them."""
        assert self._found is not None
        try:
            manifest, seal = read_manifest(self._found), seal_of(self._found) or b""
            found = match_base(plan, manifest, read_index(self._found, manifest), self.folder, seal)
            self.base = found.without(self._lost(found), self._storage.folder)
        except (FormatError, NotCommittedError, StorageError) as error:
            _log.warning(
                "%s: all of it is written, for the step before it cannot be read: %s",
                self._storage.location,
                error,
            )
            self.base = no_base(plan, self.folder)
        return self.base

    def _lost(self, base: Base) -> list[int]:
        """Rows of the step's files that are not as long as they were written."""
        sizes = [self._storage.sibling(record.folder).size(record.name) for record in base.files]
        return [row for row, record in enumerate(base.files) if record.size != sizes[row]]
