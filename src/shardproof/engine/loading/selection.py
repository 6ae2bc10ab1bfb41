"""Maps names of the target of a load to names of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardproof._utils.lazy_mapping import LazyMapping
from shardproof.engine.planning import rename_keys
from shardproof.engine.state import Catalogue


def renamed(catalogue: Catalogue, rename: Mapping[str, str] | None) -> tuple[Catalogue, dict[str, str]]:
    """The catalogue under the target's names, and each of those names as the checkpoint has it.

    `rename` has the key in the checkpoint by the key in the target; see `rename_keys`.

    Raises:
        StructureError: a stored key is not in the checkpoint, or two keys get one name.
    """
    if not rename:
        return catalogue, {}
    names = rename_keys((*catalogue.tensors, *catalogue.objects), rename, stored_first=False)
    objects = {names[key]: key for key in catalogue.objects}
    view = replace(
        catalogue,
        tensors={names[key]: value for key, value in catalogue.tensors.items()},
        aliases={names[key]: names[value] for key, value in catalogue.aliases.items()},
        objects=LazyMapping(objects, lambda key: _with_references(catalogue.objects[objects[key]], names)),
    )
    return view, {target: stored for stored, target in names.items()}


def _with_references(value: Any, names: Mapping[str, str]) -> Any:
    """A plain value whose references to tensors follow the renaming."""
    if isinstance(value, list):
        return [_with_references(item, names) for item in value]
    if isinstance(value, dict):
        return {
            key: names.get(item, item)
            if key == "$tensor" and isinstance(item, str)
            else _with_references(item, names)
            for key, item in value.items()
        }
    return value
