"""Checks that the load hooks of some rank used each stored key that belongs to no rank's target."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardproof.errors import KeyMismatchError

__all__ = ["HookReport", "check_hooks"]


class HookReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of one rank, after its load hooks have run."""

    leftover: tuple[str, ...] = ()
    """Keys of the checkpoint that the hooks got and did not use."""
    used: tuple[str, ...] = ()
    """Keys that they got and used."""


def check_hooks(location: str, reports: Sequence[HookReport], only_adapted: Sequence[str]) -> None:
    """Coordinator: checks that each stored key belongs to a target, or that the hooks of a rank used it.

    Args:
        location: the checkpoint.
        reports: those of all ranks.
        only_adapted: the keys that belong to no target, as `agree` returned them.

    Raises:
        KeyMismatchError: keys are left.
    """
    used = {key for report in reports for key in report.used}
    leftover = {key for report in reports for key in report.leftover}.intersection(only_adapted) - used
    if leftover:
        keys = sorted(leftover)
        raise KeyMismatchError(
            f"{location}: the checkpoint does not fit the state after the load hooks of its modules.\n"
            f"  unexpected ({len(keys)}): {', '.join(keys[:20])}\nstrict=False ignores these keys.",
            missing=[],
            unexpected=keys,
            mismatched=[],
        )
