"""The table of foreign formats: which reader opens a path."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from shardproof.errors import FormatError
from shardproof.interop.reader import Foreign, FormatReader
from shardproof.interop.writer import FormatWriter

__all__ = ["READERS", "WRITERS", "open_reader", "recognized", "writer_of"]

READERS: Mapping[str, str] = {
    "dcp": "dcp:DcpReader",
}
"""Name of each format and where its reader is, in the order in which a path is looked at."""

WRITERS: Mapping[str, str] = {
    "dcp": "dcp_writer:DcpWriter",
    "fsdp_dtensor": "dcp_writer:FsdpDTensorWriter",
    "torch_dist": "megatron_writer:TorchDistWriter",
    "torch": "torch_writer:TorchWriter",
}
"""Name of each format that can be written and where its writer is."""


def writer_of(name: str) -> type[FormatWriter]:
    """The writer of a format.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in WRITERS:
        raise ValueError(f"a checkpoint is written as one of {', '.join(WRITERS)}, not {name!r}")
    module, _, attribute = WRITERS[name].partition(":")
    writer: type[FormatWriter] = getattr(import_module(f"shardproof.interop.{module}"), attribute)
    return writer


def _reader(name: str) -> type[FormatReader]:
    module, _, attribute = READERS[name].partition(":")
    reader: type[FormatReader] = getattr(import_module(f"shardproof.interop.{module}"), attribute)
    return reader


def recognized(foreign: Foreign) -> str | None:
    """The name of the format of a path; None if no reader recognizes it."""
    return next((name for name in READERS if _reader(name).recognizes(foreign)), None)


def open_reader(foreign: Foreign, format: str | None = None) -> FormatReader:  # noqa: A002 as in sp.open
    """Opens a foreign checkpoint.

    Args:
        foreign: where it is.
        format: name of the format; None to find it.

    Raises:
        FormatError: no reader recognizes the path, or its metadata is damaged.
        NotCommittedError: the save of the checkpoint did not finish.
        StorageError: a file of the metadata is missing or unreadable.
    """
    if format is not None and format not in READERS:
        raise ValueError(f"format is one of {', '.join(READERS)}, not {format!r}")
    name = format or recognized(foreign)
    if name is None:
        raise FormatError(
            f"{foreign.location} is no checkpoint of a known format ({', '.join(READERS)}). Name its format "
            "with format=, or on the command line with --format",
            file=foreign.location,
        )
    return _reader(name)(foreign)
