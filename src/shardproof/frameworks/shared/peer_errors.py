"""Errors of shardproof that the except clauses of a framework catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary, extract_tb
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

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
