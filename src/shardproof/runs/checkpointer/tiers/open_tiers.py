"""Opens the storages of a run's tiers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardproof.engine.storage import (
    LocalStorage,
    Location,
    Storage,
    is_bucket_url,
    is_same_place,
    storage_at,
)
from shardproof.runs.checkpointer.run_options import NodeLocal, SecondTier


def check_node_local(first: Storage, node_local: NodeLocal | None) -> None:
    """Checks that a first tier can be on the local disks of the nodes.

    Raises:
        ValueError: it cannot.
    """
    if node_local is not None and not isinstance(first, LocalStorage):
        raise ValueError(f"node_local needs a folder on the disk of each node, not {first.location}")


def open_tiers(
    root: Location, tier: SecondTier | None, options: Mapping[str, Any] | None
) -> tuple[Storage, Storage | None]:
    """The storages of the first and the second tier; None without a second one.

    Raises:
        ValueError: one tier is the other one, or inside it.
        StorageError: a location is not valid, or `options` are given and no tier is an object store.
    """
    if tier is None:
        return storage_at(root, options), None
    first = storage_at(root, options if is_bucket_url(root) or not is_bucket_url(tier.location) else None)
    second = storage_at(tier.location, options if is_bucket_url(tier.location) else None)
    if is_same_place(first, second):
        raise ValueError(
            f"the second tier is the first one, {first.location}: pass another place as second_tier="
        )
    if first.path is not None and second.path is not None:
        places = os.path.realpath(first.path), os.path.realpath(second.path)
        if os.path.commonpath(places) in places:
            raise ValueError(
                f"one tier is inside the other: root is {first.location}, and second_tier is "
                f"{second.location}. Pass a folder outside of the run as second_tier="
            )
    return first, second
