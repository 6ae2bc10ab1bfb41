"""Formats of other projects: one reader and one writer each, behind two protocols.

`FormatReader` describes a checkpoint: keys, dtypes, shapes and where each stored box lies. `FormatWriter`
cuts a checkpoint into units and writes them. Nothing that a pickle names is imported or called.
"""

from shardproof.interop.extents import Extent, FileRange
from shardproof.interop.formats import (
    NATIVE,
    READERS,
    WRITERS,
    format_of,
    keeps_tensors_of_values,
    open_reader,
    tensors_in_values,
    writer_of,
)
from shardproof.interop.json_files import read_json
from shardproof.interop.pickle_data import Opaque, opaque_names, parts_of
from shardproof.interop.pickle_writer import Named, PickledCall, write_pickle
from shardproof.interop.read_budget import check_repeats
from shardproof.interop.reader import (
    Foreign,
    FormatReader,
    StoredBox,
    StoredView,
    TensorDescription,
    Unreadable,
    ZeroRule,
    foreign_faults,
    foreign_of,
)
from shardproof.interop.state_paths import Path as Path  # not listed in __all__: internal
from shardproof.interop.state_paths import is_paths_key, paths_in, paths_object, renamed_path, state_paths
from shardproof.interop.writer import BoxSource, Contents, FormatWriter, Unit, WriteOptions

__all__ = [
    "NATIVE",
    "READERS",
    "WRITERS",
    "BoxSource",
    "Contents",
    "Extent",
    "FileRange",
    "Foreign",
    "FormatReader",
    "FormatWriter",
    "Named",
    "Opaque",
    "PickledCall",
    "StoredBox",
    "StoredView",
    "TensorDescription",
    "Unit",
    "Unreadable",
    "WriteOptions",
    "ZeroRule",
    "check_repeats",
    "foreign_faults",
    "foreign_of",
    "format_of",
    "is_paths_key",
    "keeps_tensors_of_values",
    "opaque_names",
    "open_reader",
    "parts_of",
    "paths_in",
    "paths_object",
    "read_json",
    "renamed_path",
    "state_paths",
    "tensors_in_values",
    "write_pickle",
    "writer_of",
]
