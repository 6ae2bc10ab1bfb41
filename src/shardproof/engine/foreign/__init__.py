"""Checkpoints of other projects, as loads see them: a reader describes keys and stored boxes.

`FormatReader` is the protocol, and `open_reader` finds the reader of a path. The readers themselves are in
`shardproof.formats`. `formats.py` names them as text, and imports one when a path needs it.
"""

from __future__ import annotations

from shardproof.engine.foreign.extents import DecodedExtent as DecodedExtent
from shardproof.engine.foreign.extents import Extent as Extent
from shardproof.engine.foreign.extents import FileRange as FileRange
from shardproof.engine.foreign.extents import crc32 as crc32
from shardproof.engine.foreign.formats import NATIVE as NATIVE
from shardproof.engine.foreign.formats import READERS as READERS
from shardproof.engine.foreign.formats import format_of as format_of
from shardproof.engine.foreign.formats import keeps_tensors_of_values as keeps_tensors_of_values
from shardproof.engine.foreign.formats import open_reader as open_reader
from shardproof.engine.foreign.formats import tensors_in_values as tensors_in_values
from shardproof.engine.foreign.read_budget import ReadBudget as ReadBudget
from shardproof.engine.foreign.read_budget import check_repeats as check_repeats
from shardproof.engine.foreign.read_budget import key_units as key_units
from shardproof.engine.foreign.reader import Foreign as Foreign
from shardproof.engine.foreign.reader import FormatReader as FormatReader
from shardproof.engine.foreign.reader import Opaque as Opaque
from shardproof.engine.foreign.reader import StoredBox as StoredBox
from shardproof.engine.foreign.reader import StoredView as StoredView
from shardproof.engine.foreign.reader import TensorDescription as TensorDescription
from shardproof.engine.foreign.reader import Unreadable as Unreadable
from shardproof.engine.foreign.reader import UnsupportedError as UnsupportedError
from shardproof.engine.foreign.reader import ZeroRule as ZeroRule
from shardproof.engine.foreign.reader import flat_boxes as flat_boxes
from shardproof.engine.foreign.reader import foreign_faults as foreign_faults
from shardproof.engine.foreign.reader import foreign_of as foreign_of
from shardproof.engine.foreign.reader import missing_file as missing_file
from shardproof.engine.foreign.reader import opaque_names as opaque_names
from shardproof.engine.foreign.reader import parts_of as parts_of
from shardproof.engine.foreign.reader import shape_of as shape_of
from shardproof.engine.foreign.state_paths import is_paths_key as is_paths_key
from shardproof.engine.foreign.state_paths import paths_in as paths_in
from shardproof.engine.foreign.state_paths import paths_object as paths_object
from shardproof.engine.foreign.state_paths import renamed_path as renamed_path
from shardproof.engine.foreign.state_paths import state_paths as state_paths
