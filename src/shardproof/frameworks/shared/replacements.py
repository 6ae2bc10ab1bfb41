"""What adapters share whose functions replace those of a framework: its classes of errors, and one saver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary, extract_tb
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardproof.engine.rendezvous import Rendezvous
from shardproof.engine.saving import Saver
from shardproof.errors import RankFailure, ShardproofError


@contextmanager
def raised_as(*classes: type[BaseException]) -> Iterator[None]:
    """An error of shardproof that leaves the block is also a torch `CheckpointException`.

    Its class, its text and its details stay. Serves as a decorator, too.

    Args:
        classes: classes of errors that a framework raises in the place of `CheckpointException`, or beside
            it. The error is an instance of each.

    Example:
        >>> import shardproof as sp
        >>> try:
        ...     with raised_as():
        ...         raise sp.KeyMismatchError("no 'w'", missing=["w"])
        ... except CheckpointException as error:
        ...     type(error).__name__, str(error), list(error.failures)
        ('KeyMismatchError', "no 'w'", [0])
    """
    try:
        yield
    except ShardproofError as error:
        as_checkpoint_exception(error, *classes)
        raise


def as_checkpoint_exception(error: ShardproofError, *classes: type[BaseException]) -> None:
    """Makes an error also an instance of torch's `CheckpointException`, and of the given classes.

    A copy by pickle has the plain class of shardproof again.
    """
    if not isinstance(error, CheckpointException):
        error.__class__ = _combined(type(error), classes)


def _combined(own: type[ShardproofError], classes: tuple[type[BaseException], ...]) -> type[ShardproofError]:
    """A subclass of all these classes with the name of the class of shardproof."""
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__str__": BaseException.__str__,
        "failures": property(_failures),
    }
    return type(own.__name__, (own, *classes, CheckpointException), names)


def _failures(error: Any) -> dict[int, tuple[BaseException, StackSummary]]:
    """Rank to its error and the calls that led to it, as torch gives them.

    Of the errors of several ranks, only the texts are known here.
    """
    if isinstance(error, RankFailure):
        return {rank: (ShardproofError(text), StackSummary()) for rank, text in error.causes.items()}
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return {rank: (error, extract_tb(error.__traceback__))}


class LastSaver:
    """The saver of the last save. The next save of the same ranks reuses its plan, buffers and threads.

    With new buffers, a save in the background takes about twice as long to begin.
    """

    def __init__(self, host_memory_budget: int | None = None) -> None:
        self._budget = host_memory_budget
        self._last: tuple[Rendezvous, Saver] | None = None

    def at(self, rendezvous: Rendezvous, location: str) -> Saver:
        """The saver of these ranks. It waits for the last save of other ranks.

        Raises:
            ShardproofError: the last save failed, and no call has read its result. Every rank gets an error.
        """
        last = self._last
        is_alone = rendezvous.world_size == 1  # each call of a process without a group has its own rendezvous
        if last is None or not (last[0] is rendezvous or (is_alone and last[0].world_size == 1)):
            if last is not None:
                with rendezvous.operation(f"save {location}"):
                    last[1].wait()
            last = self._last = rendezvous, Saver(rendezvous, host_memory_budget=self._budget)
        return last[1]
