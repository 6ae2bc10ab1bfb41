"""Checks, before a save writes, that its bytes fit into the file systems of the ranks.

Note "No false refusal": a save is refused only if it certainly fails. The check counts the bytes of the
chunks and of their second copies, and no headers, digests or objects. A save with a base is not checked,
because unchanged chunks are not written. A file system may free blocks some time after their file is removed,
so the check waits a few seconds for space before it refuses.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardproof._utils.humanize import gigabytes, listed
from shardproof.engine.format import STEP_FOLDER
from shardproof.engine.storage import FreeSpace, Storage
from shardproof.errors import NoSpaceError

_log = logging.getLogger("shardproof")
_WAIT_SECONDS = 3.0
_POLL_SECONDS = 0.1


def free_space(storage: Storage) -> FreeSpace | None:
    """The space for new files of a storage; None if it is not known."""
    return storage.free_space()


def check_space(
    location: str,
    spaces: Sequence[FreeSpace | None],
    needed: NDArray[np.int64],
    measure: Callable[[], FreeSpace | None],
) -> None:
    """Checks the sum of the bytes on each file system (note "No false refusal").

    Logs a warning if the bytes may not fit.

    Args:
        location: location of the save, for messages.
        spaces: the space that each rank sees; None: not known.
        needed: (ranks,) bytes that each rank is certain to write.
        measure: measures the space of rank 0 again.

    Raises:
        NoSpaceError: the bytes do not fit.
    """
    by_system: dict[int, list[int]] = {}
    for rank, space in enumerate(spaces):
        if space is not None and needed[rank] > 0:
            for system in (space.file_system, space.copies_on):
                if system is not None:
                    by_system.setdefault(system, []).append(rank)
    for system, ranks in by_system.items():
        total = int(needed[ranks].sum())
        seen = [space for space in spaces if space is not None and space.file_system == system]
        if not seen:
            continue
        free = max(space.free for space in seen)
        bound = max((space.upper_bound for space in seen if space.upper_bound is not None), default=None)
        if bound is not None and total > bound:
            if spaces[0] is None or spaces[0].file_system != system or not _grows(total, measure):
                raise _no_space(location, sorted(set(ranks)), total, bound, seen[0].advice)
        elif total > free:
            _log.warning(
                "%s: the save writes %s to a file system with %s free, and may fail. If it does, %s",
                location,
                gigabytes(total),
                gigabytes(free),
                _advice(location, seen[0].advice),
            )


def _advice(location: str, more: str) -> str:
    """Says how to get more space for a save at `location`. `more` is the advice of its storage.

    It does not advise a smaller ``keep=``: retention removes steps only after a commit.
    """
    run, _, folder = location.rpartition("/")
    end = f", or {more}" if more else ""
    if STEP_FOLDER.fullmatch(folder) is None:
        return f"remove other files of this file system, or save to another one{end}"
    return (
        f"remove all steps but the newest with `shardproof prune {shlex.quote(run)} --keep 1 --yes` (keep= "
        "of the Checkpointer removes steps only after a commit, so a smaller one does not help now), or save "
        f"to another file system{end}"
    )


def _grows(total: int, measure: Callable[[], FreeSpace | None]) -> bool:
    """True as soon as `total` bytes may fit; False if they do not within `_WAIT_SECONDS`."""
    ends = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < ends:
        time.sleep(_POLL_SECONDS)
        now = measure()
        if now is None or now.upper_bound is None or total <= now.upper_bound:
            return True
    return False


def _no_space(location: str, ranks: Sequence[int], needed: int, free: int, advice: str) -> NoSpaceError:
    who = f"ranks {listed(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return NoSpaceError(
        f"{location}: the save needs {gigabytes(needed)} on the file system of {who}, and {gigabytes(free)} "
        f"is free there: {gigabytes(needed - free)} is missing. Nothing was written. To save again, "
        f"{_advice(location, advice)}",
        file=location,
        errno="ENOSPC",
        needed=needed,
        free=free,
        ranks=list(ranks),
    )
