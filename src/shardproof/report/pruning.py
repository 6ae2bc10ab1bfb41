"""What `prune` would remove from a run's folder, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardproof.format import references_in
from shardproof.report.runs import scan_run
from shardproof.storage import Storage

if TYPE_CHECKING:
    from shardproof.checkpointer import Leftover

__all__ = ["PrunePlan", "plan_prune"]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What goes and what stays."""

    leftovers: tuple[Leftover, ...]
    """Of dead saves: to be removed."""
    steps: tuple[str, ...]
    """Folders of committed steps beyond those to keep: to be removed."""
    steps_bytes: int
    """Of these, and of the settled suspects."""
    settled: tuple[str, ...]
    """Folders of settled suspects older than a step that is kept: to be removed."""
    unsettled: tuple[str, ...]
    """Folders of suspects that are not settled: they stay."""
    young: tuple[Leftover, ...]
    """Not named by a manifest, but too young to say that their save is dead: they stay."""
    damaged: tuple[str, ...]
    """Folders whose manifest or index cannot be used: they stay, for `repair`."""
    beyond_repair: tuple[str, ...]
    """Folders of committed steps whose shard files are missing or cut, and that stay."""
    lost: tuple[str, ...]
    """The same, to be removed."""
    lost_bytes: int
    lent: dict[str, list[str]]
    """Folders whose files stay in part although their step is, or has been, removed: to the folders of the
    steps that refer to these files."""
    unknown: tuple[str, ...]
    """Folders whose manifests cannot be read. They may refer to files of other steps, so none of those go."""

    @property
    def bytes(self) -> int:
        """Bytes to be removed."""
        return self.steps_bytes + self.lost_bytes + sum(leftover.bytes for leftover in self.leftovers)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.leftovers or self.steps or self.settled or self.lost)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"bytes": self.bytes, **asdict(self)}


def plan_prune(
    storage: Storage,
    modified: Callable[[str], float | None],
    *,
    older_than: float,
    now: float,
    keep: int | None = None,
    damaged: bool = False,
) -> PrunePlan:
    """Looks at a run and plans; removes nothing.

    Args:
        storage: the run's folder.
        modified: when the file of this name was last written, Unix seconds; None if it is gone.
        older_than: seconds for which a leftover, or a damaged step, must not have been written to.
        now: Unix seconds.
        keep: committed steps to keep, the newest; None for all, and all suspects. A damaged step is not one
            of them.
        damaged: whether steps that cannot be repaired go.
    """
    from shardproof.checkpointer import KeepLatest, leftovers, parse_step, plan_removal

    references = references_in(storage)
    found = leftovers(storage, modified, references)
    old = [leftover for leftover in found if leftover.older_than(older_than, now)]
    infos = scan_run(storage, sizes=True)
    scanned = {step: info for info in infos if (step := parse_step(info.name)) is not None}
    committed = [step for step, info in scanned.items() if info.committed]
    kept = set(committed) if keep is None else KeepLatest(keep).select(committed)
    young = tuple(leftover for leftover in found if leftover not in old)
    # A save that may be replacing a step is not to lose its files with it.
    busy = {leftover.folder for leftover in young}
    gone = [
        info
        for info in (scanned[step] for step in committed if step not in kept)
        if info.name not in busy and not info.linked
    ]
    newest = -1 if keep is None else max(committed, default=-1)
    suspects = [info for info in infos if info.suspect and info.status != "leftover"]
    settled = [
        info.name
        for info in suspects
        if info.verdict is not None
        and (info.step or 0) < newest
        and info.name not in busy
        and not info.linked
    ]
    hopeless = [info.name for info in scanned.values() if info.beyond_repair and not info.linked]
    lost = []
    for name in hopeless if damaged else ():
        times = [time for file in _ours(storage, name) if (time := modified(file)) is not None]
        # A copy that is under way looks the same.
        if name not in busy and times and now - max(times) >= older_than:
            lost.append(name)
    steps = [info.name for info in gone]
    removal = plan_removal(storage, [*steps, *settled, *lost])
    counted = {f"{leftover.folder}/{file}" for leftover in old for file in leftover.files}
    in_steps = in_lost = 0
    for file in {*removal.manifests, *removal.files} - counted:
        if file.partition("/")[0] in lost:
            in_lost += storage.size(file) or 0
        else:
            in_steps += storage.size(file) or 0
    lenders = {info.name: list(info.lends) for info in infos if info.status == "lends"}
    left = references_in(storage, without=[*steps, *settled, *lost])
    return PrunePlan(
        leftovers=tuple(old),
        steps=tuple(steps),
        steps_bytes=in_steps,
        settled=tuple(settled),
        unsettled=tuple(info.name for info in suspects if info.verdict is None),
        young=young,
        damaged=tuple(
            info.name for info in scanned.values() if info.status == "damaged" and not info.beyond_repair
        ),
        beyond_repair=tuple(name for name in hopeless if name not in lost),
        lost=tuple(lost),
        lost_bytes=in_lost,
        lent={name: left.users(name) for name in {**lenders, **removal.lent} if left.users(name)},
        unknown=tuple(references.unknown),
    )


def _ours(storage: Storage, folder: str) -> list[str]:
    from shardproof.checkpointer import is_ours

    return [name for name in storage.list(folder) if is_ours(name.removeprefix(f"{folder}/"), folder)]
