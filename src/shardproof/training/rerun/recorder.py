"""Rank 0 writes the machine's messages to the process's log and to the log of rejected results."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence

from shardproof.training.rerun.attribution import Attribution
from shardproof.training.rerun.result_log import Rejected, ResultLog, Spread
from shardproof.training.rerun.statistics import Differences

_log = logging.getLogger("shardproof")
_FROM_OUTSIDE = "rejected from outside of the step"


class Recorder:
    """Writes on rank 0 and does nothing on other ranks.

    Args:
        rank: the rank of this process.
        results: the log of rejected results, or None.
    """

    def __init__(self, rank: int, results: ResultLog | None) -> None:
        self._writes = rank == 0
        self._results = results

    def warn(self, step: int, text: str) -> None:
        """Log a text about a step."""
        if self._writes:
            _log.warning("rerun: step %d %s", step, text)

    def attributed(self, attribution: Attribution) -> None:
        """Log the attribution of rejected results."""
        if self._writes:
            _log.warning("rerun: %s", attribution)
            self._append(attribution.records(time.time()))

    def outside(self, step: int, faults: Collection[tuple[int, str]]) -> None:
        """Log faults outside of a step.

        Args:
            step: the step whose results are discarded.
            faults: messages, each with the rank at fault.
        """
        if not self._writes:
            return
        for rank, message in faults:
            _log.error("rerun: the results of step %d are discarded, due to rank %d: %s", step, rank, message)
        self._append(
            [
                Rejected(
                    step=step,
                    rank=rank,
                    node="",
                    device="",
                    index=-1,
                    call=-1,
                    message=message,
                    first=None,
                    second=None,
                    verdict=_FROM_OUTSIDE,
                    time=time.time(),
                )
                for rank, message in faults
            ]
        )

    def spreads(self, step: int, differences: Mapping[str, Differences]) -> None:
        """Log the differences between runs so far.

        Args:
            step: number of decided steps.
            differences: the differences on this rank, by the message of `validate`.
        """
        if self._writes:
            now = time.time()
            self._append(
                [
                    Spread(
                        spread_of=name,
                        step=step,
                        rank=0,
                        count=seen.count,
                        quantiles=dict(seen.quantiles()),
                        time=now,
                    )
                    for name, seen in sorted(differences.items())
                    if seen.count
                ]
            )

    def _append(self, records: Sequence[Rejected | Spread]) -> None:
        if self._results is not None:
            self._results.append(*records)
