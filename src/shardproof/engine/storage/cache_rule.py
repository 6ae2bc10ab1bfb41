"""The rule that decides whether the bytes of a checkpoint go through the page cache.

Note: the rule
    1. The user decides, by `LocalStorage(direct=...)` or the environment variable SHARDPROOF_DIRECT: 1 for
       past the cache (direct), 0 for through it.
    2. A save beside training goes past it: the copies into pages would take processors from training.
    3. A save that the caller waits for, and a load, go through it if the bytes fit: those that the ranks of
       the node move take at most half of the available memory, with the limits of control groups. So the next
       load finds them in memory.
    4. If they do not fit, they go past it, because their pages would displace those of other files.

    Nothing is measured. The phases of a save and of a load tell the choice and its reason (`cache`).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from shardproof._utils.humanize import gigabytes
from shardproof._utils.topology import available_memory, ranks_here

VARIABLE = "SHARDPROOF_DIRECT"
"""The environment variable by which the user chooses: 1 for past the page cache, 0 for through it."""

_SHARE = 2
"""The bytes fit if they take at most half of the available memory."""


class CacheChoice(NamedTuple):
    """Whether bytes go through the page cache, and why."""

    through: bool
    reason: str

    def __str__(self) -> str:
        return f"{'through' if self.through else 'past'}: {self.reason}"


def users_choice() -> bool | None:
    """The choice in the environment variable SHARDPROOF_DIRECT: direct (1), through the cache (0), or None.

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {value!r}: set it to 1 to read and write past the page "
            "cache (O_DIRECT), to 0 to do so through it, or unset it"
        )
    return None if value == "" else value == "1"


def choose_cache(
    nbytes: int, *, most: int | None = None, direct: bool | None = None, beside_training: bool = False
) -> CacheChoice:
    """Decides for the bytes that this rank reads or writes; see "the rule".

    Args:
        nbytes: bytes of this rank.
        most: bytes that all ranks of the node can move at most, because they read the same files; None if
            they move different bytes.
        direct: the choice of `LocalStorage(direct=...)`.
        beside_training: True for a save in the background.

    Raises:
        ValueError: the environment variable has an unknown value.

    >>> choose_cache(1 << 20, direct=True)
    CacheChoice(through=False, reason='direct=True')
    >>> choose_cache(1 << 62, direct=None).through
    False
    """
    if direct is not None:
        return CacheChoice(not direct, f"direct={direct}")
    if (chosen := users_choice()) is not None:
        return CacheChoice(not chosen, f"{VARIABLE}={int(chosen)}")
    if beside_training:
        return CacheChoice(False, "beside training")
    return fits_cache(nbytes, most=most)


def fits_cache(nbytes: int, *, most: int | None = None) -> CacheChoice:
    """Whether the page cache has space for these bytes of this rank; arguments as for `choose_cache`."""
    needed, available = nbytes * ranks_here(), available_memory()
    if most is not None:
        needed = min(needed, most)
    sizes = f"{gigabytes(needed)} of {gigabytes(available)} of available memory"
    if needed * _SHARE <= available:
        return CacheChoice(True, f"at most half: {sizes}")
    return CacheChoice(False, f"more than half: {sizes}")
