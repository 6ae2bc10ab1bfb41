"""A folder on a simulated disk: a loss of power takes what was not flushed.

Note: what a loss of power leaves
    A flush of a file keeps its bytes. A flush of a folder keeps the names in it. Of all other changes, any
    part may survive: `restart` draws for each changed name and each changed file. A file that was written and
    not flushed comes back with its old bytes, its new bytes, a prefix of them, or zeros. A folder whose own
    name was never flushed is lost with everything in it.

The files are real, below a temporary folder. Only the functions of `os` are replaced, so `LocalStorage` runs
as it is, with its order of writes and flushes.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest import mock

from tests.faulty_system import path_of

__all__ = ["Disk", "Failure", "Rot"]

Failure = Literal["power", "kill", "full", "error"]
"""How the disk fails. "power": the machine loses power. "kill": all processes end, and the machine goes on.
"full": there is no room for new bytes and names. "error": one operation fails with an I/O error."""

Rot = Literal["flipped", "cut", "gone"]
"""What happened to a file behind the back of the system."""

_TARGET_LAST = ("link", "replace", "rename")
_NEEDS_ROOM = ("open", "pwrite", "ftruncate", "mkdir", "link")
_CHANGES = ("open", "pwrite", "ftruncate", "fsync", "mkdir", "rmdir", "link", "unlink", "replace", "rename")


@dataclass(eq=False)
class _File:
    durable: bytes | None = None
    """Bytes as of the last flush; None if there was none."""
    last: bytes = b""
    """Bytes when its last name was removed."""
    paths: set[str] = field(default_factory=set)
    whole: bytes | None = None
    """Bytes before `Disk.overwrite` changed them; None if it did not."""

    def now(self) -> bytes:
        for path in self.paths:
            with open(path, "rb") as file:
                return file.read()
        return self.last

    def rot(self) -> Rot | None:
        """How the bytes differ from what the system wrote; None if they do not."""
        if self.whole is None or (now := self.now()) == self.whole:
            return None
        return "cut" if len(now) < len(self.whole) else "flipped"

    def after_loss(self, chance: Random) -> bytes:
        now, durable = self.now(), self.durable or b""
        if now == self.durable:
            return now
        return chance.choice([durable, now, now[: chance.randint(0, len(now))], bytes(len(now))])


@dataclass(eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    """The names as of the last flush."""


class Disk:
    """A context in which a folder is on the simulated disk.

    Args:
        folder: an empty folder.

    >>> import tempfile
    >>> with Disk(Path(tempfile.mkdtemp())) as disk:
    ...     (descriptor) = os.open(disk.folder / "a", os.O_WRONLY | os.O_CREAT)
    ...     os.fsync(descriptor)
    ...     os.close(descriptor)
    ...     disk.restart("power", Random(1))
    ...     os.listdir(disk.folder)  # the bytes were flushed, and the name was not
    []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operations = 0
        """Changes that were begun so far."""
        self.failed: Failure | None = None
        """The failure that happened; None if none did since the last `restart` or `heal`."""
        self._top = str(folder)
        self._root = _Folder()
        self._open: dict[int, _File | _Folder] = {}
        self._due: tuple[int, Failure] | None = None
        self._removed: set[str] = set()
        """Paths of the files that `remove` took, and that no process has written again."""
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in (*_CHANGES, "close")}
        self._patches = [
            mock.patch.object(os, name, self._wrap(name, real)) for name, real in self._real.items()
        ]

    def __enter__(self) -> Disk:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def fail(self, after: int, how: Failure) -> None:
        """Fails one operation after `after` more. "power" and "kill" fail all later ones, too."""
        self._due = self.operations + after, how

    def heal(self) -> None:
        """Ends a failure that the processes survive, and cancels one that has not happened."""
        self.failed, self._due = None, None

    def restart(self, how: Failure, chance: Random) -> None:
        """Puts the folder into the state that processes find after the failure."""
        with self._lock:
            if how == "power":
                image = self._after_loss(self._root, chance)
                self._root = _Folder()
                for entry in list(self.folder.iterdir()):
                    if entry.is_dir():
                        self._rmtree(entry)
                    else:
                        self._real["unlink"](entry)
                self._write(image, self._top, self._root)
            self._open = {}
            self.heal()

    def overwrite(self, path: Path, data: bytes) -> None:
        """Changes the bytes of a file behind the back of the system, as rot does."""
        node = self._at(str(path))
        assert isinstance(node, _File)
        node.whole = node.now() if node.whole is None else node.whole
        with open(path, "wb") as file:  # not through `os`
            file.write(data)
        node.durable = data

    def remove(self, path: Path) -> None:
        """Removes a file behind the back of the system."""
        self._real["unlink"](path)
        for names in (self._folder(str(path.parent)).names, self._folder(str(path.parent)).durable):
            names.pop(path.name, None)
        self._removed.add(str(path))

    def rotten(self, below: Path) -> dict[str, Rot]:
        """The files that `overwrite` and `remove` changed, as they are now, by their path below a folder.

        A file that a process has written again under the same name is whole.
        """
        top = str(below)
        found: dict[str, Rot] = {
            path[len(top) + 1 :]: "gone" for path in self._removed if path.startswith(top + "/")
        }
        folders = [("", self._at(top))]
        while folders:
            path, folder = folders.pop()
            for name, node in folder.names.items() if isinstance(folder, _Folder) else ():
                if isinstance(node, _Folder):
                    folders.append((f"{path}{name}/", node))
                elif (rot := node.rot()) is not None:
                    found[path + name] = rot
        return found

    def wipe(self, folder: Path) -> None:
        """Removes a folder and all below it behind the back of the system, as the loss of a disk does."""
        with self._lock:
            above = self._folder(str(folder.parent))
            for names in (above.names, above.durable):
                names.pop(folder.name, None)
            self._removed = {path for path in self._removed if not path.startswith(f"{folder}/")}
            if folder.exists():
                self._rmtree(folder)

    def _rmtree(self, folder: Path) -> None:
        for patch in self._patches:
            patch.stop()
        try:
            shutil.rmtree(folder)
        finally:
            for patch in self._patches:
                patch.start()

    def _after_loss(self, folder: _Folder, chance: Random) -> dict[str, Any]:
        """Names to bytes and `_File.whole`, or to the names of a folder."""
        image: dict[str, Any] = {}
        for name in sorted({*folder.names, *folder.durable}):
            versions = folder.durable.get(name), folder.names.get(name)
            node = versions[0] if versions[0] is versions[1] else chance.choice(versions)
            if isinstance(node, _File):
                image[name] = node.after_loss(chance), node.whole
            elif node is not None:
                image[name] = self._after_loss(node, chance)
        return image

    def _write(self, image: dict[str, Any], path: str, folder: _Folder) -> None:
        for name, content in image.items():
            below = f"{path}/{name}"
            node: _File | _Folder
            if isinstance(content, tuple):
                data, whole = content
                descriptor = self._real["open"](below, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                os.write(descriptor, data)
                self._real["close"](descriptor)
                node = _File(data, paths={below}, whole=whole)
            else:
                self._real["mkdir"](below)
                node = _Folder()
                self._write(content, below, node)
            folder.names[name] = folder.durable[name] = node

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            target = arguments[1] if name in _TARGET_LAST else arguments[0]
            if name == "close":
                self._open.pop(target, None)
                return real(*arguments, **options)
            if isinstance(target, int):
                if target not in self._open:
                    return None if name == "fsync" else real(*arguments, **options)
                path = ""
            else:
                path = path_of(target, _of_target(name, options))
                if path != self._top and not path.startswith(self._top + "/"):
                    return real(*arguments, **options)
            with self._lock:
                return self._change(name, real, path, arguments, options)

        return call

    def _change(self, name: str, real: Callable[..., Any], path: str, arguments: Any, options: Any) -> Any:
        if name == "open" and not arguments[1] & os.O_CREAT:
            descriptor = real(*arguments, **options)
            node = self._at(path)
            if node is not None:
                self._open[descriptor] = node
            return descriptor
        self._may_fail(name, path)
        if name == "fsync":
            node = self._open[arguments[0]]
            if isinstance(node, _File):
                node.durable = node.now()
            else:
                node.durable = dict(node.names)
            return None
        if name in ("unlink", "replace", "rename"):
            self._forget(path)
        if name in ("replace", "rename"):
            source = path_of(arguments[0], options)
            node = self._at(source)
        elif name == "link":
            node = self._at(path_of(arguments[0], options))
        result = real(*arguments, **options)
        if name in ("pwrite", "ftruncate"):
            return result
        parent, _, last = path.rpartition("/")
        names = self._folder(parent).names
        self._removed.discard(path)
        if name == "open":
            if last not in names:
                names[last] = _File(paths={path})
            self._open[result] = names[last]
        elif name == "mkdir":
            names[last] = _Folder()
        elif name in ("rmdir", "unlink"):
            names.pop(last, None)
        else:
            assert node is not None
            names[last] = node
            if isinstance(node, _File):
                node.paths.add(path)
            if name != "link":
                if isinstance(node, _File):
                    node.paths.discard(source)
                else:
                    _move(node, source, path)
                above, _, first = source.rpartition("/")
                del self._folder(above).names[first]
        return result

    def _may_fail(self, name: str, path: str) -> None:
        number, self.operations = self.operations, self.operations + 1
        if self._due is not None and number >= self._due[0]:
            self.failed, self._due = self._due[1], None
            if self.failed == "error":
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.failed in ("power", "kill"):
            raise OSError(errno.EIO, "the machine is off", path)
        if self.failed == "full" and name in _NEEDS_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _forget(self, path: str) -> None:
        """Keeps the bytes of a file that loses a name."""
        node = self._at(path)
        if isinstance(node, _File):
            node.last = node.now()
            node.paths.discard(path)

    def _at(self, path: str) -> _File | _Folder | None:
        node: _File | _Folder | None = self._root
        for part in path[len(self._top) :].split("/"):
            if part:
                node = node.names.get(part) if isinstance(node, _Folder) else None
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._at(path)
        assert isinstance(node, _Folder), path
        return node


def _of_target(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call that concern the path that it changes."""
    return {"dir_fd": options.get("dst_dir_fd")} if name in _TARGET_LAST else options


def _move(folder: _Folder, source: str, path: str) -> None:
    """Gives the files in a renamed folder their new paths."""
    for node in folder.names.values():
        if isinstance(node, _Folder):
            _move(node, source, path)
        else:
            node.paths = {
                path + old[len(source) :] if old.startswith(f"{source}/") else old for old in node.paths
            }
