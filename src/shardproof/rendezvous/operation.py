"""Meetings that belong together, on one rank."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol, Self

from shardproof.rendezvous import verdicts

__all__ = ["Operation", "Order"]


class Order(Protocol):
    """Keeps the order of the meetings of a rank."""

    def enter(self, operation: Operation) -> None:
        """Meetings of this thread belong to this operation."""

    def exit(self, operation: Operation) -> None:
        """They do not any more."""

    def leave(self, operation: Operation) -> None:
        """This rank takes no part in the rest of this operation."""


class Operation:
    """What all ranks do together, in one meeting or several. Left with an error, it fails on all ranks.

    A thread that enters it meets for it. Another thread may claim it, and enter it after that.

    Args:
        name: the same on all ranks.
        order: of the meetings of this rank; None where no other rank waits.
    """

    def __init__(self, name: str, order: Order | None = None) -> None:
        self.name = name
        self.phase = "begin"
        """Of its last meeting."""
        self.first: int | None = None
        """Number of its first meeting, once that had a result."""
        self.is_over = False
        """Whether its last meeting failed, on all ranks alike."""
        self.cause = ""
        """Why this rank left it."""
        self.following: int | None = None
        """Number of the meeting after those that were given up for it."""
        self._order = order
        self._owner: dict[str, int] = {}

    def claim(self) -> bool:
        """Whether the calling thread is the first that claims it, which then carries it out or leaves it."""
        return self._owner.setdefault("thread", threading.get_ident()) == threading.get_ident()

    def __enter__(self) -> Self:
        if self._order is not None:
            self._order.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._order is None:
            return
        if error is not None and not self.is_over and self.claim():
            self.cause = verdicts.cause_text(error)
            self._order.leave(self)
        self._order.exit(self)
