"""Every error that shardproof raises, in one tree.

An error says what was expected, what was found, where (key, rank, file, byte) and what to do next. Because
one rank's failure is everyone's answer, an error must survive a trip through the rendezvous:
`to_wire` and `from_wire` carry the class, the message and the details as plain JSON values.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadyCommittedError",
    "CorruptChunkError",
    "FormatError",
    "KeyMismatchError",
    "NotCommittedError",
    "PlainDataError",
    "RankFailure",
    "RankSilent",
    "ReentrantCallError",
    "SaveSkipped",
    "ShardproofError",
    "StorageError",
    "StructureError",
    "TilingError",
]


class ShardproofError(Exception):
    """Root of all errors of this package.

    Args:
        message: the whole text for a person.
        details: plain JSON values that a program may read, for example ``key="model.weight"``.

    >>> error = StructureError("shapes differ", key="w")
    >>> again = ShardproofError.from_wire(error.to_wire())
    >>> type(again).__name__, str(again), again.details
    ('StructureError', 'shapes differ', {'key': 'w'})
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self).__name__, self.message, self.details))

    def to_wire(self) -> dict[str, Any]:
        """This error as plain JSON values."""
        return {"type": type(self).__name__, "message": self.message, "details": self.details}

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> ShardproofError:
        """The error that `to_wire` described."""
        return _rebuild(wire["type"], wire["message"], wire["details"])


class TilingError(ShardproofError):
    """The boxes of a tensor do not cover it exactly once (gap, overlap, or out of bounds).

    Details: ``key``, ``kind``, ``box``, ``holders``.
    """


class StructureError(ShardproofError):
    """The state of one rank, or of several taken together, is not a state that can be kept.

    Details: ``key`` where one key is meant.
    """


class KeyMismatchError(StructureError):
    """What a load asks for and what the checkpoint holds differ.

    Details: ``missing``, ``unexpected``, ``mismatched`` (lists).
    """


class PlainDataError(ShardproofError):
    """A value that cannot be stored as plain data. Details: ``path``."""


class RankFailure(ShardproofError):
    """Some ranks failed, so the operation failed on every rank.

    Details: ``phase`` and ``causes`` (rank, as a string, to the text of its error).
    """

    @property
    def phase(self) -> str:
        """The phase in which the ranks failed, as `shardproof.events.PHASES` has it."""
        return str(self.details["phase"])

    @property
    def causes(self) -> dict[int, str]:
        """Rank to the text of its error."""
        return {int(rank): text for rank, text in self.details["causes"].items()}


class RankSilent(ShardproofError):
    """Some ranks were not heard from within the deadline.

    Details: ``phase``, ``ranks``, ``last_heard`` (rank, as a string, to seconds ago or None if never) and
    ``progress`` (rank, as a string, to a text).
    """

    @property
    def phase(self) -> str:
        """The phase in which the ranks fell silent, as `shardproof.events.PHASES` has it."""
        return str(self.details["phase"])

    @property
    def ranks(self) -> list[int]:
        """The silent ranks."""
        return [int(rank) for rank in self.details["ranks"]]


class SaveSkipped(ShardproofError):
    """A save was asked for its result, and had been skipped because the one before was still under way."""


class ReentrantCallError(ShardproofError):
    """A signal handler or a callback called what the thread that it interrupted is inside of.

    Nothing was begun. Details: ``call`` and ``inside``.
    """


class NotCommittedError(ShardproofError):
    """There is no committed checkpoint at this place. Details: ``path``."""


class FormatError(ShardproofError):
    """A file of a checkpoint is not what the format says. Details: ``file``."""


class CorruptChunkError(ShardproofError):
    """Stored bytes do not match their digest. Details: ``file``, ``key``, ``byte_start``, ``byte_count``."""


class StorageError(ShardproofError):
    """The storage refused or failed an operation.

    Details: ``file``, and where they tell something ``errno``, ``missing``, and ``damaged``: false where the
    checkpoint may be whole all the same.
    """


class AlreadyCommittedError(StorageError):
    """A committed checkpoint is in the way and overwriting was not asked for. Details: ``path``."""


def _subclasses(root: type[ShardproofError]) -> dict[str, type[ShardproofError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _subclasses(child)
    return found


def _rebuild(name: str, message: str, details: dict[str, Any]) -> ShardproofError:
    return _subclasses(ShardproofError).get(name, ShardproofError)(message, **details)
