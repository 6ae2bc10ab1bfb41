"""What the machine says: to the process's log, and to the log of rejected results. Rank 0 speaks for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence

from shardproof.rerun.attribution import Attribution
from shardproof.rerun.result_log import Rejected, ResultLog, Spread
from shardproof.rerun.statistics import Differences

__all__ = ["Recorder"]

_log = logging.getLogger("shardproof")
_FROM_OUTSIDE = "rejected from outside of the step"


class Recorder:
    """Writes on rank 0; does nothing elsewhere.

    Args:
        rank: of this process.
        results: the log of rejected results, if there is one.
    """

    def __init__(self, rank: int, results: ResultLog | None) -> None:
        self._speaks = rank == 0
        self._results = results

    def say(self, step: int, text: str) -> None:
        """Something about a step, for people."""
        if self._speaks:
            _log.warning("rerun: step %d %s", step, text)

    def attributed(self, attribution: Attribution) -> None:
        """What rejected results were found to be."""
        if self._speaks:
            _log.warning("rerun: %s", attribution)
            self._append(attribution.records(time.time()))

    def outside(self, step: int, said: Collection[tuple[int, str]]) -> None:
        """Something outside of the step is wrong.

        Args:
            step: that is not used because of it.
            said: what is wrong, each with the rank that it is about.
        """
        if not self._speaks:
            return
        for rank, message in said:
            _log.error("rerun: step %d is not used, because of rank %d: %s", step, rank, message)
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
                for rank, message in said
            ]
        )

    def spreads(self, step: int, differences: Mapping[str, Differences]) -> None:
        """How much runs differed so far.

        Args:
            step: number of steps that were decided.
            differences: of this rank, by the text that `validate` was given.
        """
        if self._speaks:
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
