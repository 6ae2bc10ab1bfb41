"""Finds the free space of a local file system.

Note "What is certain": a save is refused only if its bytes cannot fit. `FreeSpace.upper_bound` is a number on
ext2, ext3, ext4, XFS and tmpfs, where a file of n bytes takes at least n bytes. Other file systems, or their
servers, may compress or share equal blocks. In a folder with a project quota, the system counts the soft
limit, which a user may exceed for a time. The reserved blocks of ext4 count towards the bound for the
superuser. They count for everyone if the mount gives them to another user or group.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
from pathlib import Path

import xxhash

from shardproof._utils import libc
from shardproof.engine.storage.base import FreeSpace

_EXT, _XFS, _TMPFS = 0xEF53, 0x58465342, 0x01021994
_EXACT = (_EXT, _XFS, _TMPFS)
"""Types of file systems on which a file of n bytes takes at least n bytes."""

_MOUNTS = Path("/proc/self/mountinfo")
_GET_ATTRIBUTES = 0x801C581F
_ATTRIBUTES = struct.Struct("=5I8x")
_IN_PROJECT = 0x200
"""FS_IOC_FSGETXATTR, its `struct fsxattr`, and FS_XFLAG_PROJINHERIT."""


def local_free_space(folder: Path) -> FreeSpace | None:
    """The space for new files in a folder, which need not exist yet. None if it is unknown."""
    try:
        there = _there(folder)
        found, device, kind = os.statvfs(there), os.stat(there).st_dev, _type_of(there)
        if found.f_blocks == 0:  # the file system has no limit, or does not know it
            return None
        bound = None
        if kind in _EXACT and not _has_project_quota(there):
            bound = found.f_frsize * (found.f_bfree if _may_use_reserve(device) else found.f_bavail)
        return FreeSpace(file_system_number(there), found.f_bavail * found.f_frsize, bound)
    except OSError:
        return None


def is_tmpfs(folder: Path) -> bool:
    """True if the files of a folder are in memory.

    Raises:
        OSError: there is no such folder, or the system does not tell.
    """
    return _type_of(folder) == _TMPFS


def file_system_number(folder: Path) -> int:
    """The number of the file system of a folder, which need not exist yet; see `FreeSpace.file_system`.

    Raises:
        OSError: the system does not tell.
    """
    there = _there(folder)
    found, device, kind = os.statvfs(there), os.stat(there).st_dev, _type_of(there)
    if kind in _EXACT:
        # The first part is equal for all processes of one running system, also in containers.
        identity = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {device}"
    else:  # devices have other numbers on other machines
        identity = f"{kind} {found.f_fsid} {found.f_blocks * found.f_frsize}"
    return xxhash.xxh64_intdigest(identity.encode())


def _there(folder: Path) -> Path:
    """The lowest folder of a path that exists."""
    return next(above for above in (folder, *folder.parents) if os.path.lexists(above))


def _type_of(path: Path) -> int | None:
    """The type of a file system, as Linux numbers it; None on other systems."""
    if sys.platform != "linux" or not libc.has("statfs"):
        return None
    buffer = ctypes.create_string_buffer(512)  # `struct statfs` begins with the type
    libc.call("statfs", ctypes.c_char_p(os.fsencode(path)), buffer)
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)


def _may_use_reserve(device: int) -> bool:
    """True if this process may write to reserved blocks, or if this is unknown."""
    if os.geteuid() == 0:
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    text = _MOUNTS.read_text(
        encoding="utf-8", errors="surrogateescape"
    )  # names of mount points are any bytes
    mounts = [line for line in text.split("\n") if number in line.split()]
    return not mounts or any("resuid=" in line or "resgid=" in line for line in mounts)


def _has_project_quota(folder: Path) -> bool:
    """True if new files in the folder belong to a project with a quota, or if this is unknown."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        answer = fcntl.ioctl(descriptor, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size))
    except OSError:  # the file system has no projects
        return False
    finally:
        os.close(descriptor)
    return bool(_ATTRIBUTES.unpack(answer)[0] & _IN_PROJECT)
