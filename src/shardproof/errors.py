"""Every error that shardproof raises, in one tree.

An error message says what was expected, what was found, where (key, rank, file, byte), and what to do next.
All ranks raise the failure of one rank, so an error must survive the way through the rendezvous: `to_wire`
and `from_wire` carry the class, the message and the details as plain JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof._utils.humanize import printable

__all__ = [
    "AlreadyCommittedError",
    "CorruptChunkError",
    "FormatError",
    "KeyMismatchError",
    "NoSpaceError",
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

_NAMES = ("key", "file", "path", "missing", "unexpected", "mismatched")
"""Details that are keys or paths, or lists of them."""


class ShardproofError(Exception):
    """Root of all errors of this package.

    Args:
        message: the whole text for people. Control characters in it are escaped, and so are line feeds in
            the keys and paths that the details name.
        details: the same facts for programs as plain JSON values, for example ``key="model.weight"``.

    >>> error = StructureError("shapes differ", key="w")
    >>> again = ShardproofError.from_wire(error.to_wire())
    >>> type(again).__name__, str(again), again.details
    ('StructureError', 'shapes differ', {'key': 'w'})
    """

    def __init__(self, message: str, **details: Any) -> None:
        if not message.isprintable():
            message = _printable(message, details)
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
        """The error that `to_wire` encoded."""
        return _rebuild(wire["type"], wire["message"], wire["details"])


class TilingError(ShardproofError):
    """The boxes of a tensor do not cover it exactly once (gap, overlap, or out of bounds).

    Details: ``key``, ``kind``, ``box``, ``holders``.
    """


class StructureError(ShardproofError):
    """A checkpoint cannot hold the state of one rank, or the states of several ranks together.

    Details: ``key``, if the error is about one key.
    """


class KeyMismatchError(StructureError):
    """The keys, shapes or dtypes that a load asks for are not those of the checkpoint.

    Details: ``missing``, ``unexpected``, ``mismatched`` (lists).
    """


class PlainDataError(ShardproofError):
    """A value cannot be stored as plain data. Details: ``path``."""


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
        """The text of the error of each failed rank."""
        return {int(rank): text for rank, text in self.details["causes"].items()}


class RankSilent(ShardproofError):
    """Some ranks showed no sign of life for the deadline.

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
    """A skipped save has no result. It was skipped because the save before it was still under way.

    Or: a step is not uploaded to the second tier, because newer steps took its place or it is damaged.
    """


class ReentrantCallError(ShardproofError):
    """A signal handler or a callback made a call inside a call of the same thread.

    The inner call did nothing. Details: ``call`` (the inner one) and ``inside`` (the outer one).
    """


class NotCommittedError(ShardproofError):
    """The folder holds no committed checkpoint. Details: ``path``."""


class FormatError(ShardproofError):
    """A file of a checkpoint does not follow the format. Details: ``file``."""


class CorruptChunkError(ShardproofError):
    """Stored bytes do not match their digest. Details: ``file``, ``key``, ``byte_start``, ``byte_count``."""


class StorageError(ShardproofError):
    """The storage refused an operation, or failed in it.

    Details: ``file``; if known, ``errno`` and ``missing``; ``damaged``, which is false if the checkpoint may
    be whole; ``unanswered``, which is true if the storage may carry out the operation later.
    """


class NoSpaceError(StorageError):
    """The files of a save cannot fit into a file system. The save wrote nothing.

    Details: ``needed`` and ``free`` (bytes), ``ranks`` (those that would write there), ``file``, ``errno``.
    """


class AlreadyCommittedError(StorageError):
    """The folder holds a committed checkpoint, and the save does not overwrite. Details: ``path``."""


def tells_nothing(details: Mapping[str, object]) -> bool:
    """Whether an error comes from the system that reads, and so says nothing about the checkpoint.

    Examples: no permission, a lost file server, a bucket that refuses a request. A missing file is no such
    error.

    >>> tells_nothing({"errno": "EACCES", "missing": False})
    True
    >>> tells_nothing({"errno": "ENOENT", "missing": True})
    False
    """
    if details.get("missing") is True:
        return False
    return bool(details.get("errno")) or details.get("damaged") is False


def _subclasses(root: type[ShardproofError]) -> dict[str, type[ShardproofError]]:
    """Name to class. A class with the name of its base, as adapters make them, does not replace the base."""
    found: dict[str, type[ShardproofError]] = {}
    for child in root.__subclasses__():
        found |= _subclasses(child)
    return found | {root.__name__: root}


def _printable(message: str, details: Mapping[str, Any]) -> str:
    """A message in which the keys and paths of the details cannot begin a line of their own."""
    for name in _NAMES:
        found = details.get(name)
        for text in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(text, str) and not text.isprintable():
                message = message.replace(text, printable(text))
    return printable(message, lines=True)


def _rebuild(name: str, message: str, details: dict[str, Any]) -> ShardproofError:
    """An error without a call of its constructor, which may have other arguments in a class of a program."""
    kind = _subclasses(ShardproofError).get(name, ShardproofError)
    error = kind.__new__(kind, message)
    ShardproofError.__init__(error, message, **details)
    return error
