"""Opens the storages of a run's tiers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardproof._utils.arguments import check_number
from shardproof.checkpointer.policies import Retention
from shardproof.storage import (
    Location,
    Storage,
    check_location,
    is_bucket_url,
    is_same_place,
    storage_at,
)

__all__ = ["check_node_local", "open_tiers"]


def check_node_local(first: Storage, node_local: bool, replicas: int) -> None:
    """Checks the options of a first tier on the local disks of the nodes.

    Raises:
        ValueError: an option is invalid, or does not fit the first tier.
    """
    if isinstance(replicas, bool) or replicas not in (0, 1):
        raise ValueError(f"replicas is 0 or 1, not {replicas!r}")
    if replicas and not node_local:
        raise ValueError(
            "replicas=1 is for the local disks or the memory of several nodes: pass node_local=True, too, or "
            "memory://RUN as the root"
        )
    if node_local and first.path is None:
        raise ValueError(f"node_local=True needs a folder on the disk of each node, not {first.location}")


def open_tiers(
    root: Location,
    then: Location | None,
    keep_then: Retention | None,
    bandwidth: int | None,
    options: Mapping[str, Any] | None,
) -> tuple[Storage, Storage | None]:
    """The storages of the first and the second tier; None without a second one.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an option of the second tier without a second tier, or an invalid one; or one tier is the
            other one, or inside it.
        StorageError: a location is not valid, or `options` are given and no tier is an object store.
    """
    if then is None:
        if keep_then is not None or bandwidth is not None:
            raise ValueError("keep_then and upload_bandwidth are for a second tier: pass then=, too")
        return storage_at(root, options), None
    check_number("upload_bandwidth", bandwidth, "of bytes a second")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(
            f"upload_bandwidth is a positive number of bytes a second, or None, not {bandwidth!r}"
        )
    check_location("then", then)
    first = storage_at(root, options if is_bucket_url(root) or not is_bucket_url(then) else None)
    second = storage_at(then, options if is_bucket_url(then) else None)
    if is_same_place(first, second):
        raise ValueError(f"the second tier is the first one, {first.location}: pass another place as then=")
    if first.path is not None and second.path is not None:
        places = os.path.realpath(first.path), os.path.realpath(second.path)
        if os.path.commonpath(places) in places:
            raise ValueError(
                f"one tier is inside the other: root is {first.location}, and then is {second.location}. "
                "Pass a folder outside of the run as then="
            )
    return first, second
