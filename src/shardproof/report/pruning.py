"""What `prune` would remove from a run's folder, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardproof.report.runs import scan_run
from shardproof.storage import Storage

if TYPE_CHECKING:
    from shardproof.checkpointer.retention import Leftover

__all__ = ["PrunePlan", "plan_prune"]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What goes and what stays."""

    leftovers: tuple[Leftover, ...]
    """Of dead saves: to be removed."""
    steps: tuple[str, ...]
    """Folders of committed steps beyond those to keep: to be removed."""
    steps_bytes: int
    young: tuple[Leftover, ...]
    """Not named by a manifest, but too young to say that their save is dead: they stay."""
    damaged: tuple[str, ...]
    """Folders whose manifest or index cannot be used: they stay, for `repair`."""
    beyond_repair: tuple[str, ...]
    """Folders of committed steps whose shard files are missing or cut, and that stay."""
    lost: tuple[str, ...]
    """The same, to be removed."""
    lost_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes to be removed."""
        return self.steps_bytes + self.lost_bytes + sum(leftover.bytes for leftover in self.leftovers)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.leftovers or self.steps or self.lost)

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
        keep: committed steps to keep, the newest; None for all. A damaged step is not one of them.
        damaged: whether steps that cannot be repaired go.
    """
    from shardproof.checkpointer.retention import KeepLatest, leftovers, parse_step

    found = leftovers(storage, modified)
    old = [leftover for leftover in found if leftover.older_than(older_than, now)]
    infos = scan_run(storage, sizes=True)
    scanned = {step: info for info in infos if (step := parse_step(info.name)) is not None}
    committed = [step for step, info in scanned.items() if info.committed]
    kept = set(committed) if keep is None else KeepLatest(keep).select(committed)
    young = tuple(leftover for leftover in found if leftover not in old)
    # A save that may be replacing a step is not to lose its files with it.
    busy = {leftover.folder for leftover in young}
    gone = [scanned[step] for step in committed if step not in kept and scanned[step].name not in busy]
    hopeless = [info.name for info in scanned.values() if info.beyond_repair]
    lost = []
    for name in hopeless if damaged else ():
        times = [time for file in _ours(storage, name) if (time := modified(file)) is not None]
        # A copy that is under way looks the same.
        if name not in busy and times and now - max(times) >= older_than:
            lost.append(name)
    in_lost = sum(storage.size(file) or 0 for name in lost for file in _ours(storage, name))
    return PrunePlan(
        leftovers=tuple(old),
        steps=tuple(info.name for info in gone),
        steps_bytes=sum(info.bytes for info in gone),
        young=young,
        damaged=tuple(
            info.name for info in scanned.values() if info.status == "damaged" and not info.beyond_repair
        ),
        beyond_repair=tuple(name for name in hopeless if name not in lost),
        lost=tuple(lost),
        lost_bytes=in_lost - sum(leftover.bytes for leftover in old if leftover.folder in lost),
    )


def _ours(storage: Storage, folder: str) -> list[str]:
    from shardproof.checkpointer.retention import is_ours

    return [name for name in storage.list(folder) if is_ours(name.removeprefix(f"{folder}/"))]
