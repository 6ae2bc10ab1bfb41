"""What a caller asks of a conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardproof.conversion.mapping import MappedTensor

__all__ = ["ConversionRequest", "KeyMap", "KeyMapFunction"]

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
    """Path of the new checkpoint."""
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
    """Bytes of tensors in one file, at most; None for the habit of the format."""
    memory_bytes: int = 4 << 30
    """Memory of all processes together, above that of their libraries."""
    workers: int = 1
    """Processes that write units, on each machine."""
    trust_pickle: bool = False
    """True to unpickle values that are no plain data. That may run code of the checkpoint."""
    register: Sequence[str] = ()
    """Names for `shardproof.state.register_by_name`, which each process calls first."""
