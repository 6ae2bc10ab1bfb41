"""The run as all tiers hold it together, for reading.

Note "Copies": the name of a shard file or an index has the attempt of its save. So files of one name have
the same bytes in all tiers, and each file is read from the nearest tier that has it. A manifest has no
attempt in its name. If tiers have different manifests of a step, that of the later save counts.

Note "Levels": a copy that turned out to be damaged is left out by a level: for a file, or for the manifest
and the index of a step, the first tier that counts. Rank 0 raises a level, and all ranks use it. The next
read of the step takes the next copy. Without a next copy, the step is passed over as damaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from shardproof.errors import FormatError, ShardproofError, StorageError
from shardproof.format import MANIFEST_NAME, Manifest, read_manifest, read_seal
from shardproof.storage import Sink, Storage

__all__ = ["Choice", "NearerCopy", "TieredRun"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NearerCopy:
    """A copy of a step, or of some of its files, that a restore does not use."""

    folder: str
    tier: str
    """Location of the run in that tier."""
    reason: str


@dataclass(slots=True)
class Choice:
    """Which copies count. All views of one `TieredRun` share it."""

    levels: dict[str, int] = field(default_factory=dict)
    """The first tier that counts, by folder of a step or by ``folder/file`` (note "Levels")."""
    seals: dict[str, bytes] = field(default_factory=dict)
    """The seal of the manifest to use, by folder of a step."""
    nearer: list[NearerCopy] = field(default_factory=list)
    """The copies that were left out."""


class TieredRun:
    """All tiers of a run, or one folder of it, as one `Storage` that can only be read.

    Args:
        tiers: the run's folder in each tier, nearest first.
        path: the folder in the run; empty for the run itself.
        choice: which copies count.

    Example:
        >>> import tempfile
        >>> from shardproof.storage import LocalStorage
        >>> near, far = LocalStorage(tempfile.mkdtemp()), LocalStorage(tempfile.mkdtemp())
        >>> near.publish("step-00000001/a", b"near")
        >>> far.publish("step-00000002/a", b"far")
        >>> run = TieredRun([near, far])
        >>> run.folders(), run.within("step-00000002").read("a")
        (['step-00000001', 'step-00000002'], b'far')
    """

    def __init__(self, tiers: Sequence[Storage], path: str = "", choice: Choice | None = None) -> None:
        self.choice = choice or Choice()
        self._runs = tiers
        self._path = path
        self._places = [run.within(path) for run in tiers] if path else list(tiers)
        self._listed: dict[int, frozenset[str]] = {}
        self._ordered: tuple[int, ...] | None = None

    @property
    def location(self) -> str:
        """Where the manifest is read from; for the run itself, the first tier."""
        return self._places[self._holder() if self._path else 0].location

    @property
    def folder(self) -> str:
        """Name of the folder."""
        return self._places[0].folder

    @property
    def linked(self) -> bool:
        """Whether the folder is a link in a tier."""
        return any(place.linked for place in self._places)

    @property
    def tier(self) -> Storage:
        """The run in the tier that the manifest is read from."""
        return self._runs[self._holder()]

    def folders(self) -> list[str]:
        """Sorted names of the folders in any tier."""
        return sorted({name for place in self._places for name in place.folders()})

    def siblings(self) -> list[str]:
        """Sorted names of the folders beside this one in any tier."""
        return sorted({name for place in self._places for name in place.siblings()})

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of the files in any tier."""
        return sorted({name for place in self._places for name in place.list(prefix)})

    def size(self, name: str) -> int | None:
        """Bytes of the nearest copy of a file; None without one."""
        for tier in self._order(name):
            size = self._places[tier].size(name)
            if size is not None:
                return size
        return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of the nearest copy of a file."""
        return self._first(name, lambda place: place.read(name, start, stop))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from the nearest copy of a file."""
        self._first(name, lambda place: place.read_into(name, start, buffer))

    def flush(self, name: str) -> None:
        """Flush the nearest copy of a file."""
        self._first(name, lambda place: place.flush(name))

    def within(self, prefix: str) -> TieredRun:
        """A folder of the run."""
        return TieredRun(self._runs, f"{self._path}/{prefix}" if self._path else prefix, self.choice)

    def sibling(self, folder: str) -> TieredRun:
        """Another folder of the run."""
        above = self._path.rpartition("/")[0]
        return TieredRun(self._runs, f"{above}/{folder}" if above else folder, self.choice)

    def close(self) -> None:
        """Close the descriptors of all tiers."""
        for place in self._places:
            place.close()

    def create(self, name: str) -> Sink:
        """Refused, as `publish` and `delete` are: a tier is written by itself."""
        self._refuse(name)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Refused, as `create`."""
        self._refuse(name)

    def delete(self, name: str) -> None:
        """Refused, as `create`."""
        self._refuse(name)

    def nearest(self, name: str) -> Storage:
        """The storage of the nearest copy of a shard file; see `CopiedStorage.nearest`."""
        return self._places[self._tier_of(name)]

    def use(self, levels: Mapping[str, int], folder: str, seal: bytes | None) -> None:
        """Takes over the choice of rank 0."""
        self.choice.levels = dict(levels)
        if seal:
            self.choice.seals[folder] = seal

    def next_copy(self, folder: str, error: ShardproofError) -> bool:
        """Raises the level of the copy that an error names. False if there is no other copy.

        Args:
            folder: of the step that could not be read.
            error: means damage.
        """
        view = self.within(folder)
        file = str(error.details.get("file", ""))
        owner, found, name = f"/{file}".rpartition("/shards/")
        if found:
            name, folder = f"shards/{name}", owner.rpartition("/")[2] or folder
            place, holder = f"{folder}/{name}", self.within(folder)
            tier = holder._tier_of(name)
            has_copy = any(holder._lists(other, name) for other in range(tier + 1, len(self._runs)))
        else:
            place, tier = folder, view._holder()
            has_copy = any(
                view._places[other].size(MANIFEST_NAME) is not None
                for other in range(tier + 1, len(self._runs))
            )
        if not has_copy:
            return False
        self.choice.levels[place] = tier + 1
        self.choice.seals.pop(folder, None)
        self._leave_out(folder, tier, error.message)
        return True

    def note_lost_files(self, folder: str, manifest: Manifest) -> None:
        """Records files of a step that are read from a farther tier than its manifest."""
        near = self.within(folder)._holder()
        lost: dict[int, list[str]] = {}
        for record in manifest.files:
            place = f"{record.folder or folder}/{record.name}"
            if place not in self.choice.levels:
                tier = self.within(record.folder or folder)._tier_of(record.name)
                if tier > near:
                    lost.setdefault(tier, []).append(record.place)
        for tier, places in lost.items():
            more = f" and {len(places) - 1} more files" if len(places) > 1 else ""
            where = self._runs[tier].location
            self._leave_out(folder, near, f"{places[0]}{more}: not there; read from {where}")

    def _leave_out(self, folder: str, tier: int, reason: str) -> None:
        copy = NearerCopy(folder, self._runs[tier].location, reason)
        if copy not in self.choice.nearer:
            self.choice.nearer.append(copy)

    def _tier_of(self, name: str) -> int:
        """The tier of the nearest copy of a shard file; that of the manifest without one."""
        level = self.choice.levels.get(f"{self._path}/{name}", 0)
        for tier in range(level, len(self._places)):
            if self._lists(tier, name):
                return tier
        return self._holder()

    def _lists(self, tier: int, name: str) -> bool:
        if tier not in self._listed:
            self._listed[tier] = frozenset(self._places[tier].list("shards"))
        return name in self._listed[tier]

    def _holder(self) -> int:
        """The tier that the manifest is read from; the first one without a manifest."""
        return self._order(MANIFEST_NAME)[0]

    def _order(self, name: str) -> tuple[int, ...]:
        """The tiers in which to look for a file, one at least."""
        level = min(self.choice.levels.get(self._path, 0), len(self._places) - 1)
        natural = tuple(range(level, len(self._places)))
        if name != MANIFEST_NAME or len(natural) == 1:
            return natural
        if self._ordered is None:
            self._ordered = self._order_of_manifests(natural)
        return self._ordered

    def _order_of_manifests(self, tiers: tuple[int, ...]) -> tuple[int, ...]:
        """Tiers with the right manifest first (note "Copies")."""
        has = [tier for tier in tiers if self._places[tier].size(MANIFEST_NAME) is not None]
        if len(has) > 1 or self._path in self.choice.seals:
            seals = {tier: read_seal(self._places[tier]) for tier in has}
            wanted = self.choice.seals.get(self._path)
            if wanted in seals.values():
                has.sort(key=lambda tier: seals[tier] != wanted)
            elif len(set(seals.values())) > 1:
                has.sort(key=lambda tier: -self._time(tier))
        return (*has, *(tier for tier in tiers if tier not in has))

    def _time(self, tier: int) -> float:
        """The time of the manifest of a tier. A damaged one counts as the earliest."""
        try:
            return read_manifest(self._places[tier]).time
        except FormatError as error:
            self._leave_out(self._path, tier, error.message)
            return -math.inf

    def _first(self, name: str, work: Callable[[Storage], T]) -> T:
        """The result of the first tier that has the file."""
        tiers = self._order(name)
        for tier in tiers[:-1]:
            try:
                return work(self._places[tier])
            except StorageError as error:
                if not error.details.get("missing"):
                    raise
        return work(self._places[tiers[-1]])

    def _refuse(self, name: str) -> NoReturn:
        raise StorageError(
            f"cannot write {name!r} to all tiers of {self._runs[0].location} at once", file=name
        )
