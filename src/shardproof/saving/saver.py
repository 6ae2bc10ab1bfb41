"""Saving again and again: one save at a time, each with what the last one left."""

from __future__ import annotations

import threading
from typing import Any

from shardproof.planning import CHUNK_BYTES
from shardproof.rendezvous import Rendezvous
from shardproof.saving.session import Committed, Kept, Request, Session
from shardproof.storage import Storage

__all__ = ["Saver"]


class Saver:
    """Saves states to any place, and keeps the plan and the buffers from one save to the next.

    A plan is valid for one structure: it is used again only when every rank's structure digest equals the
    digest that the plan was made from, and every rank still holds its part of that plan.

    Args:
        rendezvous: where the ranks meet.
        chunk_bytes: upper bound of a stored chunk.
    """

    def __init__(self, rendezvous: Rendezvous, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._rendezvous = rendezvous
        self._chunk_bytes = chunk_bytes
        self._kept = Kept()
        self._turn = threading.Lock()

    def save(
        self,
        storage: Storage,
        state: Any,
        *,
        step: int | None = None,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Committed:
        """Saves a state tree and returns once it is committed. Called by every rank; one save at a time.

        Raises:
            AlreadyCommittedError: a committed checkpoint is in the way and `overwrite` is False.
            StructureError, TilingError, PlainDataError: the state cannot be kept; nothing was committed.
            RankFailure, RankSilent: a rank failed or fell silent; nothing was committed.
            StorageError: the storage failed.
        """
        request = Request(step, metadata or {}, overwrite)
        with self._turn:  # threads of one rank take turns; a save waits for ranks, and those have deadlines
            return Session(self._rendezvous, storage, request, self._kept, self._chunk_bytes).run(state)
