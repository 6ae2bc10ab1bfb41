"""Formats of other projects: one reader and one writer each, behind two protocols.

`shardproof.engine.foreign.FormatReader` describes a checkpoint: keys, dtypes, shapes and where each stored
box lies. `FormatWriter` cuts a checkpoint into units and writes them. Nothing that a pickle names is imported
or called.
"""

from __future__ import annotations

from shardproof.formats.json_values import read_json
from shardproof.formats.pickle_writer import Named, PickledCall, write_pickle
from shardproof.formats.writer import (
    WRITERS,
    BoxSource,
    Contents,
    FormatWriter,
    Unit,
    WriteOptions,
    writer_of,
)

__all__ = [
    "WRITERS",
    "BoxSource",
    "Contents",
    "FormatWriter",
    "Named",
    "PickledCall",
    "Unit",
    "WriteOptions",
    "read_json",
    "write_pickle",
    "writer_of",
]
