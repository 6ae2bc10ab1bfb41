"""The ranks of a node, and the processors that each may use."""

from __future__ import annotations

import os
import re

__all__ = ["processors", "ranks_here"]


def ranks_here() -> int:
    """Number of this job's ranks on this node, from torchrun, Slurm, Open MPI or MPICH; otherwise 1."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        found = os.environ.get(name, "")
        if found.isdecimal() and int(found) > 0:
            return int(found)
    return _tasks_of_slurm(
        os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("SLURM_NODEID", "")
    )


def processors() -> float:
    """Processors that this rank may use: its own, or its share of those that the node's ranks share.

    >>> processors() > 0
    True
    """
    total, ranks = os.cpu_count() or 1, ranks_here()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return usable if usable * ranks <= total else usable / ranks


def _tasks_of_slurm(tasks: str, node: str) -> int:
    """Number of tasks of a Slurm job step on one of its nodes.

    Args:
        tasks: Slurm's list of tasks by node, for example "4(x2),3".
        node: number of the node in the step.

    >>> [_tasks_of_slurm("4(x2),3", str(node)) for node in range(3)]
    [4, 4, 3]
    """
    if not node.isdecimal():
        return 1
    left = int(node)
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        left -= int(times or 1)
        if left < 0:
            return max(1, int(count))
    return 1
