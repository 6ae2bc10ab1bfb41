"""Formats of other projects: one reader and one writer each, behind two protocols.

`FormatReader` describes a checkpoint: keys, dtypes, shapes and where each stored box lies. `FormatWriter`
cuts a checkpoint into units and writes them. Nothing that a pickle names is imported or called.
"""

from shardproof.interop.extents import DecodedExtent, Extent, FileRange
from shardproof.interop.formats import READERS, WRITERS, open_reader, recognized, writer_of
from shardproof.interop.pickle_data import Opaque, opaque_names
from shardproof.interop.reader import (
    Foreign,
    FormatReader,
    StoredBox,
    StoredView,
    TensorDescription,
    flat_boxes,
)
from shardproof.interop.writer import BoxSource, Contents, FormatWriter, Unit, WriteOptions

__all__ = [
    "READERS",
    "WRITERS",
    "BoxSource",
    "Contents",
    "DecodedExtent",
    "Extent",
    "FileRange",
    "Foreign",
    "FormatReader",
    "FormatWriter",
    "Opaque",
    "StoredBox",
    "StoredView",
    "TensorDescription",
    "Unit",
    "WriteOptions",
    "flat_boxes",
    "opaque_names",
    "open_reader",
    "recognized",
    "writer_of",
]
