"""Checkpoints of other projects, as loads see them: a reader describes keys and stored boxes.

`FormatReader` is the protocol, and `open_reader` finds the reader of a path. The readers themselves are in
`shardproof.formats`. `formats.py` names them as text, and imports one when a path needs it.
"""

from __future__ import annotations

from shardproof.engine.foreign.extents import DecodedExtent, Extent, FileRange, crc32
from shardproof.engine.foreign.formats import (
    NATIVE,
    READERS,
    format_of,
    keeps_tensors_of_values,
    open_reader,
    tensors_in_values,
)
from shardproof.engine.foreign.read_budget import ReadBudget, check_repeats, key_units
from shardproof.engine.foreign.reader import (
    Foreign,
    FormatReader,
    Opaque,
    StoredBox,
    StoredView,
    TensorDescription,
    Unreadable,
    UnsupportedError,
    ZeroRule,
    flat_boxes,
    foreign_faults,
    foreign_of,
    missing_file,
    opaque_names,
    parts_of,
    shape_of,
)
from shardproof.engine.foreign.state_paths import (
    Path,
    is_paths_key,
    paths_in,
    paths_object,
    renamed_path,
    state_paths,
)

__all__ = [
    "NATIVE",
    "READERS",
    "DecodedExtent",
    "Extent",
    "FileRange",
    "Foreign",
    "FormatReader",
    "Opaque",
    "Path",
    "ReadBudget",
    "StoredBox",
    "StoredView",
    "TensorDescription",
    "Unreadable",
    "UnsupportedError",
    "ZeroRule",
    "check_repeats",
    "crc32",
    "flat_boxes",
    "foreign_faults",
    "foreign_of",
    "format_of",
    "is_paths_key",
    "keeps_tensors_of_values",
    "key_units",
    "missing_file",
    "opaque_names",
    "open_reader",
    "parts_of",
    "paths_in",
    "paths_object",
    "renamed_path",
    "shape_of",
    "state_paths",
    "tensors_in_values",
]
