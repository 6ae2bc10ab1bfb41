"""The request of a conversion, and the tensors that a key map gives.

A mapped tensor is made of boxes of stored tensors: renamed, fused, split, stacked and padded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardproof._utils.arguments import check_boolean, wrong_type


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a written tensor that comes from a box of a stored one.

    The elements correspond in row-major order. So the two boxes have equally many elements, but may have
    different numbers of dimensions (one layer of a stack, one of many experts). With `axes`, the dimensions
    of the stored box are permuted first.
    """

    offsets: tuple[int, ...]
    """First index of the box in the written tensor."""
    sizes: tuple[int, ...]
    key: str | None
    """Key of the stored tensor; None for zeros (padding)."""
    source_offsets: tuple[int, ...] = ()
    """First index of the box in the stored tensor."""
    source_sizes: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    """Order of the stored dimensions, as `torch.permute` takes it; empty to leave it."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A written tensor, and where its elements come from."""

    dtype: str
    """Torch's name of the dtype that is written."""
    shape: tuple[int, ...]
    moves: Sequence[Move]
    """Boxes that tile the shape."""


KeyMapFunction: TypeAlias = Callable[
    [Mapping[str, tuple[str, tuple[int, ...]]], Mapping[str, Any]], Mapping[str, MappedTensor]
]
"""From the dtype and shape of each stored tensor, and the plain values, to the written tensors."""
KeyMap: TypeAlias = str | KeyMapFunction
"""Map between the keys of two projects: its name, the path of a TOML file that declares it, or a function."""


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """A conversion. Every process plans the same from an equal request."""

    source: str
    """Path of the stored checkpoint: its folder or file."""
    destination: str
    """Path or URL of the new checkpoint."""
    to: str
    """Name of the format to write."""
    format: str | None = None
    """Name of the stored format; None to find it."""
    dtype: str | None = None
    """Torch's name of the dtype that floating point tensors are converted to; None to leave them."""
    include: Sequence[str] | None = None
    """Patterns of the keys to convert; None for all."""
    exclude: Sequence[str] | None = None
    """Patterns of the keys to leave out."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Stored key to written key, for a key and all below it. An empty written key removes the prefix."""
    key_map: KeyMap | None = None
    """Map between the keys of two projects, applied after `include` and `exclude` and before `rename`."""
    max_file_bytes: int | None = None
    """Bytes of tensors in one file, at most; None for the format's default."""
    memory_bytes: int = 4 << 30
    """Memory of all processes together, above that of their libraries."""
    workers: int = 1
    """Processes that write units, on each machine."""
    trust_pickle: bool = False
    """True to unpickle values that are not plain data. This may run code in the checkpoint."""
    register: Sequence[str] = ()
    """Names for `shardproof.state.register_by_name`, which each process calls first."""
    like: str = ""
    """Folder of a model whose configuration and tokenizer are copied (format "hf"); empty for none."""
    temporary: str = ""
    """Folder for the work folder of a destination in an object store. Equal in all processes."""

    def __post_init__(self) -> None:
        if not (self.key_map is None or isinstance(self.key_map, str) or callable(self.key_map)):
            raise wrong_type(
                "key_map", self.key_map, "a name, the path of a TOML file as a text, a function or None"
            )
        check_boolean("trust_pickle", self.trust_pickle)
        if self.like and self.to != "hf":
            raise ValueError(f"like (--like) goes with the format hf, not with {self.to}")
        if self.max_file_bytes is not None and self.max_file_bytes < 1:
            raise ValueError(
                f"max_file_bytes (--max-file-size) is at least 1 or None, not {self.max_file_bytes}"
            )
        if self.workers < 1:
            raise ValueError(f"workers is at least 1, not {self.workers}")
