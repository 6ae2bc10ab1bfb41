"""Stores plain values, step and metadata beside the tensors, in formats that have no place for them.

They are JSON values under names that begin with ``shardproof:``: attributes of a Zarr group, or texts of a
safetensors header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardproof.engine.foreign import TensorDescription, Unreadable
from shardproof.engine.state import decode_plain, encode_plain
from shardproof.errors import FormatError, PlainDataError, StructureError
from shardproof.formats.writer import Contents

PREFIX = "shardproof:"
OBJECTS, ALIASES = f"{PREFIX}objects", f"{PREFIX}aliases"
STEP, METADATA = f"{PREFIX}step", f"{PREFIX}metadata"
_MOST_STEP = 2**63 - 1


def encode_embedded(contents: Contents) -> dict[str, Any]:
    """Returns plain values, step and metadata by name, as JSON values. Absent ones get no name.

    Raises:
        PlainDataError: a value is not plain data.

    >>> encode_embedded(Contents({}, objects={"betas": (0.9, 1)}, step=3))
    {'shardproof:objects': {'betas': {'$tuple': [0.9, 1]}}, 'shardproof:step': 3}
    """
    found: dict[str, Any] = {}
    if contents.objects:
        found[OBJECTS] = {key: encode_plain(value, key) for key, value in sorted(contents.objects.items())}
    if contents.step is not None:
        found[STEP] = contents.step
    if contents.metadata:
        found[METADATA] = encode_plain(dict(contents.metadata), "metadata")
    return found


def check_aliases(contents: Contents) -> None:
    """Checks that each alias names a tensor and is not the key of a tensor itself."""
    for alias, key in contents.aliases.items():
        if alias in contents.tensors or key not in contents.tensors:
            raise StructureError(f"{alias!r} cannot be tied to {key!r}", key=alias)


@dataclass(frozen=True, slots=True)
class EmbeddedValues:
    """What was stored beside the tensors."""

    objects: Mapping[str, Any]
    """Plain values, encoded."""
    aliases: Mapping[str, str]
    unreadable: Mapping[str, Unreadable]
    """Keys that are tied to a tensor that cannot be read."""
    step: int | None
    metadata: Mapping[str, Any]

    @staticmethod
    def of(
        members: Mapping[str, Any],
        tensors: Mapping[str, TensorDescription],
        unreadable: Mapping[str, Unreadable],
        fault: Callable[[str], FormatError],
    ) -> EmbeddedValues:
        """Checks and decodes the values that a file has under the names of this module.

        Raises:
            FormatError: a value is damaged.
        """
        objects, aliases = members.get(OBJECTS, {}), members.get(ALIASES, {})
        step = members.get(STEP)
        if not isinstance(objects, dict) or not isinstance(aliases, dict):
            raise fault(f"{OBJECTS} and {ALIASES} are not JSON objects")
        known = tensors.keys() | unreadable.keys()
        for alias, key in aliases.items():
            if alias in known or not isinstance(key, str) or key not in known:
                raise fault(f"{ALIASES} ties {alias!r} to {key!r}")
        if clash := objects.keys() & (known | aliases.keys()):
            raise fault(f"{min(clash)!r} is a tensor and a value of {OBJECTS}")
        if step is not None and (type(step) is not int or not 0 <= step <= _MOST_STEP):
            raise fault(f"{STEP} is {step!r}")
        try:
            metadata = decode_plain(members.get(METADATA, {}), path=METADATA)
        except PlainDataError as error:
            raise fault(error.message) from error
        if not isinstance(metadata, dict):
            raise fault(f"{METADATA} is not a dict")
        readable = {alias: key for alias, key in aliases.items() if key in tensors}
        tied = {alias: unreadable[key] for alias, key in aliases.items() if key in unreadable}
        return EmbeddedValues(objects, readable, tied, step, metadata)

    def object(self, key: str) -> Any:
        """Decodes a plain value.

        Raises:
            KeyError: no value has this key.
            FormatError: the value is damaged.
        """
        try:
            return decode_plain(self.objects[key], path=key)
        except PlainDataError as error:
            raise FormatError(f"{OBJECTS}: {error.message}", key=key) from error
