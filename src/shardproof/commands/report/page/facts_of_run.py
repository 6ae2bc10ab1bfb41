"""The facts of the page of a run: what `ls`, `doctor` and a restore say about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from shardproof.engine.storage import Storage
from shardproof.errors import NotCommittedError, StorageError
from shardproof.runs.checkpointer import (
    Examination,
    StepInfo,
    Verdict,
    best_interval,
    interval_advice,
    leftovers,
    plan_restore,
    read_node_mark,
    save_seconds,
    scan_run,
)
from shardproof.version import __version__

MOST_STEPS = 2000
"""Steps on a page. Older ones are left out, and counted."""
_HOURS = (1, 3, 6, 12, 24, 72, 168, 720)
"""Times between two failures for which the page suggests an interval."""
_MEANINGS = {verdict.value: verdict.meaning for verdict in Verdict}


def heading(page: str, location: str) -> dict[str, Any]:
    """The facts that every page begins with."""
    return {"page": page, "location": location, "made": time.time(), "program": f"shardproof {__version__}"}


def run_facts(
    tiers: Sequence[Storage],
    examination: Examination,
    *,
    mtbf: float | None = None,
    blocked: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """The facts of a run, as plain JSON values.

    Args:
        tiers: the run's folder in each tier, nearest first.
        examination: of the first tier.
        mtbf: seconds between two failures of the job, on average; None: not known.
        blocked: seconds that training waited for the save of each step, from traces.

    Raises:
        StorageError: a tier cannot be read.
    """
    run = tiers[0]
    modified = cache(run.modified)
    written: dict[str, float] = {}
    for leftover in leftovers(run, modified):
        if leftover.modified is not None:
            written[leftover.folder] = max(leftover.modified, written.get(leftover.folder, 0.0))
    second = {info.name: info.status for info in scan_run(tiers[1])} if len(tiers) > 1 else None
    infos = examination.infos[-MOST_STEPS:]
    return heading("run", run.location) | {
        "steps": [
            info.to_json()
            | {
                "meaning": _MEANINGS[info.status],
                "seconds": save_seconds(info, modified),
                "blocked": None if info.step is None or info.suspect else (blocked or {}).get(info.step),
                "written": written.get(info.name),
                "second_tier": None if second is None else second.get(info.name, "absent"),
            }
            for info in infos
        ],
        "steps_left_out": len(examination.infos) - len(infos),
        "restore": _restore(tiers),
        "interval": _interval(examination.infos, modified, mtbf),
        "examination": examination.to_json(),
    }


def _restore(tiers: Sequence[Storage]) -> dict[str, Any]:
    """The step that a restore takes, or why none, and the newer steps that it passes over."""
    facts: dict[str, Any] = {"takes": None, "passed_over": [], "fault": None}
    mark = read_node_mark(tiers[0])
    if mark is not None:
        return facts | {"fault": f"{mark.sentence}. A restore with node_local=True reads them"}
    try:
        chosen = plan_restore(tiers)
    except (NotCommittedError, StorageError) as error:
        return facts | {"fault": error.message}
    facts["takes"] = None if chosen.folder is None else chosen.folder.name
    facts["passed_over"] = [
        {"folder": item.folder.name, "reason": item.reason, "damaged": item.damaged, "tier": item.tier}
        for item in chosen.passed
    ]
    return facts


def _interval(
    infos: Sequence[StepInfo], modified: Callable[[str], float | None], mtbf: float | None
) -> dict[str, Any] | None:
    """The advice of `ls --mtbf`, and suggestions for other times between failures."""
    advice = interval_advice(infos, modified, mtbf or _HOURS[0] * 3600.0)
    if advice is None:
        return None
    facts = asdict(advice) | {"differs_much": advice.differs_much}
    if mtbf is None:
        facts |= {"mtbf": None, "suggested": None, "differs_much": None}
    others = [
        {"mtbf": 3600.0 * hours, "suggested": best_interval(advice.cost, 3600.0 * hours)} for hours in _HOURS
    ]
    return facts | {"suggestions": others}
