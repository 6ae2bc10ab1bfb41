"""All tiers of a run as one storage, for reads.

Note "Copies": the name of a shard file or an index has the attempt of its save. So files of one name have
the same bytes in all tiers, and each file is read from the nearest tier that has it. A manifest has no
attempt in its name. If tiers have different manifests of a step, that of the later save counts.

Note "Left out": rank 0 leaves out a damaged copy of a file, by the number of its tier. All ranks do the same,
because tiers have the same numbers on all ranks. The next read of the step takes the next copy. Without a
next copy, another save of the step counts, if a tier has one. Without such a save, the step is passed over as
damaged, and each file of older steps is read from the nearest copy again.

Note "Copies that vanish": retention or another process may remove a step of the first tier while it is read
there. The copy on the second tier is then the nearest one. It is not left out for the copy that is gone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NoReturn, Self, TypeAlias, TypeVar

from shardproof.engine.format import MANIFEST_NAME, FileRecord, Manifest, read_manifest, read_seal
from shardproof.engine.storage import Sink, Storage, check_folder, check_name
from shardproof.errors import FormatError, NotCommittedError, ShardproofError, StorageError

T = TypeVar("T")

_log = logging.getLogger("shardproof")


@dataclass(frozen=True, slots=True)
class NearerCopy:
    """A copy of a step, or of some of its files, that a restore does not use."""

    folder: str
    tier: str
    """Location of the run in that tier."""
    reason: str
    damaged: bool = True
    """True if a save of the step may replace it."""


@dataclass(slots=True)
class CopyChoice:
    """The choice of copies. All views of one `TieredRun` share it."""

    left_out: dict[str, list[int]] = field(default_factory=dict)
    """The tiers whose copy does not count, by ``folder/file`` (note "Left out")."""
    seals: dict[str, bytes] = field(default_factory=dict)
    """The seal of the manifest to use, by folder of a step."""
    nearer: list[NearerCopy] = field(default_factory=list)
    """The copies that were left out."""
    other_saves: dict[str, list[NearerCopy]] = field(default_factory=dict)
    """The copies of a step that are not of the save in use, by folder of the step."""
    vanished: dict[str, int] = field(default_factory=dict)
    """Number of copies that were gone at a read, by ``folder/file`` (note "Copies that vanish")."""


class TieredRun(Storage):
    """All tiers of a run, or one folder of it, as one `Storage` that can only be read.

    Args:
        tiers: the run's folder in each tier, nearest first; in the same order on all ranks.

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

    has_several = True
    """True if a file may have several copies."""
    _manifest_is_final = True
    """True if the manifest of a folder does not change while this object is in use."""

    def __init__(self, tiers: Sequence[Storage]) -> None:
        self.choice = CopyChoice()
        self._runs = tiers
        self._path = ""
        """The folder in the run; empty for the run itself."""
        self._places = list(tiers)
        """This folder in each tier."""
        self._listed: dict[int, frozenset[str]] = {}
        self._ordered: tuple[int, ...] | None = None

    @property
    def location(self) -> str:
        """The location of the manifest; for the run itself, that of the first tier."""
        return self._places[self._holder() if self._path else 0].location

    @property
    def folder(self) -> str:
        """Name of the folder."""
        return self._places[0].folder

    @property
    def linked(self) -> bool:
        """True if the folder is a link in a tier."""
        return any(self._ask("linked", lambda place: place.linked).values())

    @property
    def tier(self) -> Storage:
        """The run in the tier that the manifest is read from."""
        return self._runs[self._holder()]

    def folders(self) -> list[str]:
        """Sorted names of the folders in any tier."""
        return _union(self._ask("folders", lambda place: place.folders()))

    def siblings(self) -> list[str]:
        """Sorted names of the folders beside this one in any tier."""
        return _union(self._ask("siblings", lambda place: place.siblings()))

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of the files in any tier."""
        return _union(self._ask("list", lambda place: place.list(prefix), prefix))

    def size(self, name: str) -> int | None:
        """Bytes of the nearest copy of a file; None without one."""
        found = (self._places[tier].size(name) for tier in self._order(name))
        return next((size for size in found if size is not None), None)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of the nearest copy of a file."""
        return self._first(name, lambda place: place.read(name, start, stop))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from the nearest copy of a file."""
        self._first(name, lambda place: place.read_into(name, start, buffer))

    @property
    def bounds_reads(self) -> bool:
        """True if the tier of the manifest bounds reads."""
        return self._places[self._holder()].bounds_reads

    def read_at_most(self, name: str, most: int) -> bytes:
        """All bytes of the nearest copy of a file; see `Storage.read_at_most`."""
        return self._first(name, lambda place: place.read_at_most(name, most))

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        """A range of the nearest copy of a file; see `Storage.read_buffer`."""
        return self._first(name, lambda place: place.read_buffer(name, start, count))

    def is_cached(self, name: str, start: int, count: int) -> bool:
        """True if most of a range of the nearest copy is in memory."""
        return self._first(name, lambda place: place.is_cached(name, start, count))

    def flush(self, name: str) -> None:
        """Flush the nearest copy of a file."""
        self._first(name, lambda place: place.flush(name))

    def within(self, prefix: str) -> Self:
        """A folder of the run."""
        check_name(prefix, self._runs[0].location)
        return self._at(f"{self._path}/{prefix}" if self._path else prefix)

    def sibling(self, folder: str) -> Self:
        """Another folder of the run."""
        above = self._path.rpartition("/")[0]
        check_folder(folder, self._runs[0].location)
        return self._at(f"{above}/{folder}" if above else folder)

    def _at(self, path: str) -> Self:
        """The folder of this path in the run, with the same choice of copies."""
        view = copy(self)
        view._path, view._places = path, [run.within(path) for run in self._runs]
        view._listed, view._ordered = {}, None
        return view

    def seen_here(self) -> Storage:
        """The part of the run that this rank sees without a request to other ranks."""
        return self

    def close(self) -> None:
        """Close the descriptors of all tiers."""
        for place in self._places:
            place.close()

    def create(self, name: str) -> Sink:
        """Refuses, as `publish` and `delete` do: each tier is written through its own storage."""
        self._refuse(name)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Refused, as `create`."""
        self._refuse(name)

    def delete(self, name: str) -> None:
        """Refused, as `create`."""
        self._refuse(name)

    def nearest(self, name: str) -> Storage:
        """The storage of the nearest copy of a shard file; see `Storage.nearest`."""
        return self._places[self._tier_of(name)]

    def copies(self, name: str) -> Sequence[Storage]:
        """The storages that have a shard file or an index, nearest first."""
        return [self._places[tier] for tier in self._order(name) if self._has(tier, name)]

    def use(self, left_out: Mapping[str, Sequence[int]], folder: str, seal: bytes | None) -> None:
        """Takes over the choice of rank 0."""
        self.choice.left_out = {place: [*tiers] for place, tiers in left_out.items()}
        if seal:
            self.choice.seals[folder] = seal

    def next_copy(self, folder: str, error: ShardproofError) -> bool:
        """Leaves out the copy that an error names. False if there is no other copy, and no other save.

        Args:
            folder: folder of the step that could not be read.
            error: means damage. Its detail ``rank`` is the rank that read the copy; without it, this one.
        """
        step = folder
        file, rank = str(error.details.get("file", "")), error.details.get("rank")
        owner, found, name = f"/{file}".rpartition("/shards/")
        if found:
            name, folder = f"shards/{name}", owner.rpartition("/")[2] or folder
        else:
            name = file.rpartition("/")[2]
            name = name if name.startswith("index-") else MANIFEST_NAME
        view = self.within(folder)
        tier, place = view._tier_of(name, rank), f"{folder}/{name}"
        vanished = self.choice.vanished.get(place, 0)
        if error.details.get("missing") and vanished < len(self._runs) and view._has(tier, name):
            self.choice.vanished[place] = vanished + 1
            return True
        left_out = [*self.choice.left_out.get(place, ()), tier]
        others = [other for other in range(len(self._runs)) if other not in left_out]
        copies = [other for other in others if view._has(other, name)]
        if not copies:
            return self._next_save(step, error)
        self.choice.left_out[place] = left_out
        self.choice.seals.pop(folder, None)
        self._leave_out(folder, tier, error.message, damaged=self._is_damage(copies))
        return True

    def _next_save(self, folder: str, error: ShardproofError) -> bool:
        """Leaves out the save of a step that is in use. False if no tier has another save of the step."""
        view = self.within(folder)
        tiers = [tier for tier in view._order(MANIFEST_NAME) if view._has(tier, MANIFEST_NAME)]
        seals = {tier: read_seal(view._places[tier]) for tier in tiers}
        used = [tier for tier in tiers if seals[tier] == seals[tiers[0]]]
        others = [tier for tier in tiers if tier not in used]
        if not others:
            return False
        place = f"{folder}/{MANIFEST_NAME}"
        self.choice.left_out[place] = [*self.choice.left_out.get(place, ()), *used]
        self.choice.seals.pop(folder, None)
        for tier in used:
            self._leave_out(folder, tier, error.message, damaged=self._is_damage(others))
        return True

    def pass_over(self) -> None:
        """Lets each file of older steps be read from its nearest copy (note "Left out")."""
        self.choice.left_out.clear()

    def anew(self) -> Self:
        """The same run without any choice of copies."""
        view = copy(self)
        view.choice = CopyChoice()
        return view

    def _is_damage(self, copies: Sequence[int]) -> bool:
        """True if the first tier is damaged by the loss of a file of which the tiers `copies` have copies."""
        return 0 not in copies

    def note_lost_files(self, folder: str, manifest: Manifest) -> None:
        """Records files of a step that are read from a farther tier than its manifest."""
        near = self.within(folder)._holder()
        lost: dict[int, list[FileRecord]] = {}
        for record in manifest.files:
            owner = record.folder or folder
            if f"{owner}/{record.name}" not in self.choice.left_out:
                tier = self.within(owner)._tier_of(record.name)
                if self._is_farther(tier, near):
                    lost.setdefault(tier, []).append(record)
        for tier, records in lost.items():
            more = f" and {len(records) - 1} more files" if len(records) > 1 else ""
            where = self._runs[tier].location
            self._leave_out(folder, near, f"{records[0].place}{more}: not there; read from {where}")

    def note_other_saves(self, folder: str) -> None:
        """Records the copies of a step that are not of the save in use, in place of earlier records."""
        self.choice.other_saves[folder] = list(self._other_saves(folder))

    def _other_saves(self, folder: str) -> Iterator[NearerCopy]:
        """The nearer tiers with an earlier save of a step."""
        view = self.within(folder)
        used = view._holder()
        seal = read_seal(view._places[used])
        # The manifest of a tier may be left out, for example because it is damaged.
        left_out = self.choice.left_out.get(f"{folder}/{MANIFEST_NAME}", ())
        unused = {copy.tier for copy in self.choice.nearer if copy.folder == folder}
        for tier in range(used):
            if tier in left_out or self._runs[tier].location in unused:
                continue
            if read_seal(view._places[tier]) not in (None, seal):
                reason = "it is an earlier save of this step"
                yield NearerCopy(folder, self._runs[tier].location, reason, damaged=False)

    def _is_farther(self, tier: int, near: int) -> bool:
        return tier > near

    def _leave_out(self, folder: str, tier: int, reason: str, *, damaged: bool = True) -> None:
        copy = NearerCopy(folder, self._runs[tier].location, reason, damaged)
        if copy not in self.choice.nearer:
            self.choice.nearer.append(copy)

    def _numbers(self, name: str, rank: int | None) -> Sequence[int]:
        """The numbers of all tiers, nearest to a rank first; None: to this one."""
        return range(len(self._places))

    def _tier_of(self, name: str, rank: int | None = None) -> int:
        """The tier of the nearest copy of a file; that of the manifest without one."""
        if name != MANIFEST_NAME:
            for tier in self._order(name, rank):
                if self._has(tier, name):
                    return tier
        return self._holder(rank)

    def _has(self, tier: int, name: str) -> bool:
        """True if a tier has a copy of a file."""
        if not name.startswith("shards/"):
            return self._places[tier].size(name) is not None
        if tier not in self._listed:
            self._listed[tier] = frozenset(self._places[tier].list("shards"))
        return name in self._listed[tier]

    def _holder(self, rank: int | None = None) -> int:
        """The tier that the manifest is read from; the first one without a manifest."""
        return self._order(MANIFEST_NAME, rank)[0]

    def _order(self, name: str, rank: int | None = None) -> tuple[int, ...]:
        """The tiers in which a rank looks for a file, one at least; None: this rank."""
        numbers = self._numbers(name, rank)
        left_out = self.choice.left_out.get(f"{self._path}/{name}", ())
        tiers = tuple(tier for tier in numbers if tier not in left_out) or (numbers[-1],)
        if name != MANIFEST_NAME or len(tiers) == 1:
            return tiers
        if rank is not None or not self._manifest_is_final:
            return self._order_of_manifests(tiers)
        if self._ordered is None:
            self._ordered = self._order_of_manifests(tiers)
        return self._ordered

    def _order_of_manifests(self, tiers: tuple[int, ...]) -> tuple[int, ...]:
        """Tiers with the right manifest first (note "Copies")."""
        wanted = self.choice.seals.get(self._path)
        if wanted is not None:
            first = next((tier for tier in tiers if read_seal(self._places[tier]) == wanted), None)
            if first is not None:
                return (first, *(tier for tier in tiers if tier != first))
        has = [tier for tier in tiers if self._places[tier].size(MANIFEST_NAME) is not None]
        if len(has) > 1 and len({read_seal(self._places[tier]) for tier in has}) > 1:
            has.sort(key=lambda tier: -self._time(tier))
        return (*has, *(tier for tier in tiers if tier not in has))

    def _time(self, tier: int) -> float:
        """The time of the manifest of a tier. A damaged one counts as the earliest."""
        try:
            return read_manifest(self._places[tier]).time
        except NotCommittedError:  # removed meanwhile
            return -math.inf
        except FormatError as error:
            others = [other for other in range(len(self._places)) if other != tier]
            self._leave_out(self._path, tier, error.message, damaged=self._is_damage(others))
            return -math.inf

    def _ask(self, do: str, work: Callable[[Storage], object], name: str = "") -> dict[int, object]:
        """The result of the method `do` with the argument `name`, which `work` calls, for each tier."""
        return {tier: work(place) for tier, place in enumerate(self._places)}

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


def _union(found: Mapping[int, object]) -> list[str]:
    """The names in the lists of all tiers, sorted."""
    return sorted({name for names in found.values() if isinstance(names, list) for name in names})


class OneCopy:
    """The methods of `TieredRun` that a restore calls, for a run with one copy of each file."""

    has_several = False

    def __init__(self, run: Storage) -> None:
        self.choice = CopyChoice()
        self._run = run

    def next_copy(self, folder: str, error: ShardproofError) -> bool:
        """False: there is no other copy."""
        return False

    def pass_over(self) -> None:
        """Does nothing: no copy is left out."""

    def note_lost_files(self, folder: str, manifest: Manifest) -> None:
        """Does nothing: a file that is lost has no copy."""

    def note_other_saves(self, folder: str) -> None:
        """Does nothing: a step has one save."""

    def use(self, left_out: Mapping[str, Sequence[int]], folder: str, seal: bytes | None) -> None:
        """Does nothing: all ranks read the one copy."""

    def seen_here(self) -> Storage:
        """The run."""
        return self._run

    def anew(self) -> Storage:
        """The run."""
        return self._run


Copies: TypeAlias = TieredRun | OneCopy


def copies_in(run: Storage) -> Copies:
    """The copies of a run's files. All views of one `TieredRun` share the choice among them."""
    return run if isinstance(run, TieredRun) else OneCopy(run)


def copies_of(folder: Storage, name: str) -> Sequence[Storage]:
    """The storages that have a shard file or an index of a step, nearest first; `folder` without any."""
    return (folder.copies(name) if isinstance(folder, TieredRun) else []) or [folder]


def log_other_copy(run: str, file: str, damage: ShardproofError) -> None:
    """Logs that a copy is uploaded in place of a damaged file."""
    _log.error("%s: a file is damaged, and its copy %s is uploaded in its place: %s", run, file, damage)
