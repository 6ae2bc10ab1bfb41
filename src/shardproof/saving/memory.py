"""How much host memory copies may take, where nobody says."""

from __future__ import annotations

from pathlib import Path

from shardproof._utils.topology import ranks_here

__all__ = ["default_budget"]

_SHARE = 4
_FALLBACK = 4 << 30


def default_budget() -> int:
    """Bytes: a quarter of the memory that is available, divided by the ranks of this node.

    >>> default_budget() > 0
    True
    """
    return max(1, min(_available(), *_limits())) // _SHARE // ranks_here()


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux: a figure that does no harm
    return _FALLBACK * _SHARE


def _limits() -> list[int]:
    """What control groups leave to this process; nothing where there is no limit."""
    found = []
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            found.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return found or [_FALLBACK * _SHARE * 1024]
