"""What each rank sees of a run, so that no rank's lost mount makes a run look empty or old.

Note "Rank 0 looks last": rank 0 lists the run after every other rank has reported. What another rank saw
committed is then visible to rank 0, or a newer step replaced it. If rank 0 sees neither, the ranks do not see
one run. The opposite case needs no rule: a rank that does not see the step that rank 0 chose cannot open it,
and the load fails on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardproof.checkpointer.step_folders import StepFolder
from shardproof.checkpointer.step_selection import Chosen, named, newest_committed, why_unreadable
from shardproof.errors import StorageError, StructureError
from shardproof.loading import from_rank
from shardproof.storage import Storage

__all__ = ["RestoreReport", "check_damage", "check_reports", "report_view"]


class RestoreReport(msgspec.Struct, frozen=True, array_like=True):
    """What one rank reports before rank 0 chooses a step."""

    step: int | None
    """The step that the rank was asked to restore; None for the newest."""
    suspect: bool
    newest: StepFolder | None = None
    """The newest committed step that the rank sees. Where a step is asked for by its number: its folder."""
    error: dict[str, object] | None = None
    """Why the rank cannot look at the run."""


def report_view(run: Storage, rank: int, step: int | None, *, suspect: bool) -> RestoreReport:
    """What this rank sees of a run.

    Rank 0 does not look here, because it looks when all have reported. Nor does any rank look where there is
    nothing to choose.

    Args:
        run: the run's folder.
        rank: of this process.
        step: see `Checkpointer.restore`; so is `suspect`.
        suspect: whether suspects count.
    """
    if rank == 0 or (step is not None and not suspect):
        return RestoreReport(step, suspect)
    try:
        return RestoreReport(step, suspect, _newest(run, step, suspect))
    except StorageError as error:
        return RestoreReport(step, suspect, error=error.to_wire())


def check_reports(run: Storage, reports: Sequence[RestoreReport]) -> None:
    """Rank 0: all ranks are asked for the same, and none sees a newer step than rank 0 (see the note).

    Raises:
        StructureError: ranks were asked to restore different steps.
        StorageError: a rank cannot look at the run, or ranks see different runs.
    """
    wanted = {(report.step, report.suspect) for report in reports}
    if len(wanted) > 1:
        steps = sorted({str(step) for step, _ in wanted})
        raise StructureError(
            f"{run.location}: ranks were asked to restore different steps: {steps}"
            f"{'' if len(steps) > 1 else ', some of them with suspect=True'}; nothing was changed"
        )
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise from_rank(rank, len(reports), report.error)
    seen = {rank: report.newest for rank, report in enumerate(reports) if report.newest is not None}
    if not seen:
        return
    newest = _newest(run, reports[0].step, reports[0].suspect)
    newer = {rank: folder for rank, folder in seen.items() if newest is None or folder > newest}
    if newer:
        rank, folder = max(newer.items(), key=lambda item: (item[1], -item[0]))
        own = f"sees no run at {run.location}" if newest is None else f"sees no step after {newest}"
        raise StorageError(
            f"{run.location}: rank 0 {own}, rank {rank} sees {folder}; nothing was changed. Is this place "
            "shared by all nodes, and mounted on the node of rank 0? Restore again when all ranks see the "
            "same steps",
            file=run.location,
            damaged=False,
            ranks=[0, *sorted(newer)],
        )


def check_damage(run: Storage, chosen: Chosen) -> None:
    """The last rank: what rank 0 took for damage when it looked at a step is damage here too.

    One rank that loses sight of a file must not cost all ranks the work since an older step. The last rank is
    on another node than rank 0 if there are several.

    Args:
        run: the run's folder.
        chosen: what rank 0 chose before anything was read.

    Raises:
        StorageError: this rank can read a newer step.
    """
    for item in chosen.passed:
        if item.damaged and why_unreadable(run, item.folder) is None:
            raise StorageError(
                f"{run.location}: this rank can read {item.folder}, and rank 0 cannot: {item.reason}\n"
                "Nothing was changed. Is this place shared by all nodes, and mounted on the node of rank 0?",
                file=run.location,
                damaged=False,
            )


def _newest(run: Storage, step: int | None, suspect: bool) -> StepFolder | None:
    return newest_committed(run, suspect=suspect) if step is None else named(run, step, suspect=suspect)
