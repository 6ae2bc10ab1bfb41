"""The optional parts of a `Checkpointer`, as values, and the storages of its tiers that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from shardproof._utils.arguments import check_number, wrong_type
from shardproof._utils.humanize import without_credentials
from shardproof.engine.storage import (
    LocalStorage,
    Location,
    Storage,
    check_location,
    is_bucket_url,
    is_same_place,
    storage_at,
)
from shardproof.runs.checkpointer.policies import Retention, check_policy, is_count

NEW_FORMS = {
    "full_every": "incremental=Incremental(full_every=...)",
    "scrub": "incremental=Incremental(scrub=...)",
    "replicas": "node_local=NodeLocal(replicas=...)",
    "then": "second_tier=...",
    "keep_then": "second_tier=SecondTier(LOCATION, keep=...)",
    "upload_bandwidth": "second_tier=SecondTier(LOCATION, bandwidth=...)",
}
"""Names that a caller may try as arguments of `Checkpointer`, with what to pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incremental:
    """Saves that write only the chunks that differ from an earlier step of the run.

    The manifest refers to that step for the other chunks. Retention does not remove files that a remaining
    step refers to. To move such a step, copy it with ``shardproof convert --standalone``.

    Args:
        full_every: at least one of this many saves in a row writes every chunk and refers to no other step.
            Damaged bytes then reach at most `full_every` steps, and each step needs fewer than `full_every`
            others. The default adds 5 % of the state's bytes to a save on average. A save that replaces a
            step without references writes every chunk, too. None: no bound, so that one damaged byte may
            reach every later step of the run.
        scrub: bytes a second at which rank 0 reads the references of the newest step again, in the background
            and from the device. It does so after saves and after a restore. It logs damage with the file, the
            bytes and the steps that need them (see `Checkpointer.damage`), and no later save refers to these
            steps. If `keep` selects no step that is proved readable, the newest proved step stays, too. A
            step is proved if it has no references, or the scrub has read them since its commit. The scrub
            yields to saves, and ends with the `Checkpointer` or the process. The default is a small share of
            what a disk reads, and 225 GiB an hour. None: no scrub.

    Raises:
        ValueError: an argument is no whole number of at least 1.

    >>> Incremental(full_every=8)
    Incremental(full_every=8, scrub=67108864)
    """

    full_every: int | None = 20
    scrub: int | None = 64 << 20

    def __post_init__(self) -> None:
        for name, unit in (("full_every", "saves"), ("scrub", "bytes a second")):
            count = getattr(self, name)
            if count is not None and not is_count(count):
                raise ValueError(f"{name} is a whole number of {unit}, at least 1, or None, not {count!r}")

    @staticmethod
    def of(value: bool | Incremental) -> Incremental | None:
        """The argument `incremental` of a `Checkpointer`; None without incremental saves.

        Raises:
            TypeError: the value is of another type.
        """
        if isinstance(value, Incremental):
            return value
        if not isinstance(value, bool):
            raise wrong_type("incremental", value, "True, False or an Incremental")
        return Incremental() if value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLocal:
    """A first tier on the local disk of each node, or in its memory, which other nodes do not see.

    Args:
        replicas: 1 to store a second copy of each file on a partner node. After the loss of a node, a restore
            then needs no second tier. After a restore, the ranks replace lost copies in the background; see
            `Checkpointer.wait_for_copies`. The same on all ranks.

    Raises:
        ValueError: `replicas` is neither 0 nor 1.

    >>> NodeLocal(replicas=1)
    NodeLocal(replicas=1)
    """

    replicas: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.replicas, bool) or self.replicas not in (0, 1):
            raise ValueError(f"replicas is 0 or 1, not {self.replicas!r}")

    @staticmethod
    def of(value: bool | NodeLocal) -> NodeLocal | None:
        """The argument `node_local` of a `Checkpointer`; None if all ranks see the first tier.

        Raises:
            TypeError: the value is of another type.
        """
        if isinstance(value, NodeLocal):
            return value
        if not isinstance(value, bool):
            raise wrong_type("node_local", value, "True, False or a NodeLocal")
        return NodeLocal() if value else None


@dataclass(frozen=True, slots=True)
class SecondTier:
    """A place for a copy of the run, such as a bucket behind a local disk. See docs/tiers.md.

    Args:
        location: a folder, a URL or a storage.
        keep: which steps stay there, as `keep` of the `Checkpointer`; None for all. A step that it selects
            stays on the first tier until it is uploaded.
        bandwidth: bytes a second that all ranks together send to it. None: no bound.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `keep` is no policy, or `bandwidth` is not positive.

    >>> SecondTier("s3://bucket/run", bandwidth=2_000_000_000)
    SecondTier(location='s3://bucket/run', keep=None, bandwidth=2000000000)
    """

    location: Location
    _: KW_ONLY
    keep: Retention | None = None
    bandwidth: int | None = None

    def __post_init__(self) -> None:
        check_location("the location of the second tier", self.location)
        check_policy("keep of the second tier", self.keep)
        check_number("bandwidth", self.bandwidth, "of bytes a second")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth is a positive number of bytes a second, or None, not {self.bandwidth!r}"
            )

    def __repr__(self) -> str:
        shown = f"SecondTier(location={self.location!r}, keep={self.keep!r}, bandwidth={self.bandwidth!r})"
        return without_credentials(shown)

    @staticmethod
    def of(value: Location | SecondTier | None) -> SecondTier | None:
        """The argument `second_tier` of a `Checkpointer`.

        Raises:
            TypeError: the value is of another type.
        """
        if value is None or isinstance(value, SecondTier):
            return value
        check_location("second_tier", value)
        return SecondTier(value)


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
