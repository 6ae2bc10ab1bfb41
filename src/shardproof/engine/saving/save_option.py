"""The optional parts of a save, which plug into its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardproof.engine import events
from shardproof.engine.planning import Structure, WritePlan
from shardproof.engine.rendezvous import MeetingSequence
from shardproof.engine.saving.cache import SaveCache
from shardproof.engine.saving.commit import Committed, PlaceChunks
from shardproof.engine.saving.messages import Attempt, OptionReport, SaveResult
from shardproof.engine.saving.shard_writer import WriteShard, WrittenShard
from shardproof.engine.state import Piece
from shardproof.engine.storage import Storage

Track = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Begins a phase, by its name and its bytes. The context takes the bytes done."""


class SaveOption:
    """An optional part of one save, on one rank. A plain save has none.

    The methods are in the order of the steps, and the defaults do nothing. Every rank calls them, except
    those whose text begins with *Coordinator*: they run in its meetings. Posts and answers are plain data of
    msgpack. Options do not depend on each other.
    """

    name = ""
    """Names the posts of this option in the messages."""
    storage: Storage
    cache: SaveCache

    def begin(self, storage: Storage, cache: SaveCache) -> None:
        """Begins the save, before any other method is called."""
        self.storage, self.cache = storage, cache

    def report(self) -> OptionReport:
        """This rank's part of the first report. It may raise an error of the request."""
        raise NotImplementedError

    def decide(self, attempt: Attempt, posts: Sequence[Any], reuse_plan: bool) -> tuple[Attempt, Any]:
        """Coordinator: the attempt, perhaps changed, and the answer to the posts of `report`."""
        return attempt, None

    def meet(
        self,
        answer: Any,
        attempt: Attempt,
        meetings: MeetingSequence,
        phase: Callable[[str], events.Phase],
    ) -> None:
        """Takes the answer, and may hold another meeting, the same on all ranks."""

    def read_state(self, pieces: Sequence[Piece], structure: Structure, track: Track) -> None:
        """Reads the state before the caller may change it."""

    def writer(self, write: WriteShard) -> WriteShard:
        """Returns the function that writes this rank's file. `write` writes the file of a full save."""
        return write

    def report_write(self, file: WrittenShard) -> Any:
        """This rank's post in the write report."""
        return None

    def check(self, plan: WritePlan, posts: Sequence[Any]) -> None:
        """Coordinator: checks the posts of `report_write` before the commit."""

    def placer(self, place: PlaceChunks) -> PlaceChunks:
        """Coordinator: returns the function that finds each chunk in a file. `place` serves a full save."""
        return place

    def complete(self, result: SaveResult, committed: Committed) -> SaveResult:
        """Coordinator: the result, perhaps changed, after the commit."""
        return result

    def committed(self, result: SaveResult, phase: events.Phase, rank: int) -> None:
        """Takes the result of the committed save."""
