"""The ranks of a node, and the processors and the memory that they may use."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath

_FALLBACK = 16 << 30
"""Bytes of available memory if the system does not tell."""
_UNLIMITED = 1 << 60
"""A limit of this size or more is none."""


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


def available_memory() -> int:
    """Bytes that this node, and the control group of this process, have left.

    >>> available_memory() > 0
    True
    """
    on_node = _FALLBACK
    with suppress(OSError, ValueError, IndexError):  # not Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                on_node = int(line.split()[1]) * 1024
    return max(1, min([on_node, *_left_in_groups()]))


def _left_in_groups(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Bytes left to this process under each memory limit of its control groups and of those above them.

    Pages of files count as left, because the kernel drops them first.
    """
    found = []
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return []  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used, kinds = mount, "memory.max", "memory.current", ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root, limit, used = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            kinds = ("total_inactive_file", "total_active_file")
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (root / inside, *(root / above for above in inside.parents)):
            try:
                if (most := int((folder / limit).read_text())) >= _UNLIMITED:
                    continue
                taken = int((folder / used).read_text())
                counts = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                found.append(max(0, most - taken + sum(int(counts[kind]) for kind in kinds)))
            except (OSError, ValueError, KeyError):
                continue  # no such group here, or the limit is "max"
    return found


def _tasks_of_slurm(tasks: str, node: str) -> int:
    """Number of tasks of a Slurm job step on one of its nodes.

    `tasks` is Slurm's list of tasks by node, for example "4(x2),3".

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
