"""Speeds of file systems, remembered from one process to the next.

One small JSON file for each node, in the user's cache folder: folders of users are often shared by nodes, and
each node sees a disk at a speed of its own. What cannot be read or written there is measured again. A device
number means the same file system only until the node starts anew, so the file names the start that it is of.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardproof.storage.durable import unlink_quietly

__all__ = ["Speeds", "recall", "remember"]

_log = logging.getLogger("shardproof")

_VALID_FOR = 7 * 24 * 3600.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of writing to one file system, in bytes a second."""

    direct: float
    """Past the page cache."""
    buffered: float
    """Through the page cache, until the disk has taken the bytes."""


def recall(device: int) -> Speeds | None:
    """What was remembered of the file system on `device` within the last week; None if nothing was.

    Args:
        device: `os.stat(...).st_dev` of a file on it.
    """
    entry = _entries().get(str(device))
    try:
        direct, buffered, when = (float(entry[key]) for key in ("direct", "buffered", "time"))  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        return None
    fresh = 0 <= time.time() - when < _VALID_FOR
    return Speeds(direct, buffered) if fresh and direct > 0 and buffered > 0 else None


def remember(device: int, speeds: Speeds) -> None:
    """Keep `speeds` of the file system on `device` for other processes of this user, if that can be done.

    Of two processes that remember at the same time, what one of them wrote may be lost.
    """
    file = _file()
    if file is None:
        return
    entries = _entries() | {str(device): {**asdict(speeds), "time": time.time()}}
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"boot": _boot(), "file_systems": entries}), encoding="utf-8")
        os.replace(draft, file)
    except OSError as error:
        unlink_quietly(draft)
        _log.debug("speeds of writing are not remembered in %s: %s", file, error)


def _entries() -> dict[str, Any]:
    file = _file()
    if file is None:
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):  # not there, or damaged: measured again, and replaced
        return {}
    if not isinstance(content, dict) or content.get("boot") != _boot():
        return {}
    entries = content.get("file_systems")
    return entries if isinstance(entries, dict) else {}


def _file() -> Path | None:
    """This node's file; None for a user without a home."""
    top = os.environ.get("XDG_CACHE_HOME", "")
    node = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "node"
    if os.path.isabs(top):
        folder = Path(top)
    else:
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    return folder / "shardproof" / f"write-speeds-{node}.json"


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # no Linux: device numbers are trusted for as long as an entry is valid
        return ""
