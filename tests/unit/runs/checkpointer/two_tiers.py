"""Runs with two tiers for tests: states, storages that fail, and comparisons."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

import shardproof as sp
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from tests.faulty_storage import FaultyStorage

WAIT = 60.0


def state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(100_000.0) + step, "b": torch.full((5,), float(step)), "n": step}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(100_000), "b": torch.zeros(5), "n": -1}


def checkpointer(
    near: Any, far: Any, keep_far: sp.Retention | None = None, **options: Any
) -> sp.Checkpointer:
    return sp.Checkpointer(
        near,
        second_tier=sp.SecondTier(far, keep=keep_far),
        rendezvous=LocalRendezvous(deadline=30.0),
        cache="none",
        **options,
    )


def alone(root: Path) -> sp.Checkpointer:
    return sp.Checkpointer(root, rendezvous=LocalRendezvous())


def unreachable(far: Path, at_first: bool) -> tuple[FaultyStorage, list[bool]]:
    """A storage whose every operation fails while ``down[0]`` is true."""
    down = [at_first]

    def fault(operation: str, name: str) -> None:
        if down[0]:
            raise sp.StorageError("no route to host", errno="EHOSTUNREACH")

    return FaultyStorage(LocalStorage(far), lambda: True, fault), down


class Silent(LocalStorage):
    """A tier that answers a request with an error, after `wait` returns."""

    wait: Callable[[str], object]

    def within(self, prefix: str) -> Silent:
        return self._with(Silent(self.path / prefix))

    def _with(self, other: Silent) -> Silent:
        other.wait = self.wait
        return other

    def size(self, name: str) -> int | None:
        self._fail("size")

    def folders(self) -> list[str]:
        self._fail("folders")

    def _fail(self, request: str) -> NoReturn:
        self.wait(request)
        raise sp.StorageError("no answer", file=self.location, damaged=False)


def assert_restores(checkpointer: sp.Checkpointer, step: int) -> sp.checkpointer.RestoredStep:
    target = blank()
    restored = checkpointer.restore(target)
    assert restored == step
    for key, value in state(step).items():
        assert torch.equal(target[key], value) if isinstance(value, torch.Tensor) else target[key] == value
    assert restored is not None
    return restored


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class _Gate:
    """Holds the first upload until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT)


class GatedStorage(LocalStorage):
    """Calls a hook before each publish and read, with the operation and the path below the root."""

    def __init__(self, path: Path, hook: Callable[[str, str], None]) -> None:
        super().__init__(path)
        self._hook = hook

    def _named(self, name: str) -> str:
        return f"{self.path.name}/{name}"

    def within(self, prefix: str) -> GatedStorage:
        return GatedStorage(self.path / prefix, self._hook)

    def sibling(self, folder: str) -> GatedStorage:
        return GatedStorage(self.path.parent / folder, self._hook)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        self._hook("publish", self._named(name))
        super().publish(name, data, replace=replace)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        self._hook("read" if start or stop is not None else "read all", self._named(name))
        return super().read(name, start, stop)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._hook("read", self._named(name))
        super().read_into(name, start, buffer)


def broken_manifest(
    near: Path, *, at_first: bool, from_commit: bool = False
) -> tuple[GatedStorage, list[bool]]:
    """Cannot read the manifest of step 1 while ``broken[0]`` is true, which a commit may set."""
    broken = [at_first]

    def hook(operation: str, name: str) -> None:
        if name != "step-00000001/manifest.json":
            return
        if operation == "publish":
            broken[0] = broken[0] or from_commit
        elif broken[0]:
            file = f"{near}/{name}"
            raise sp.StorageError(f"cannot read {file} (EIO)", file=file, errno="EIO", missing=False)

    return GatedStorage(near, hook), broken


def damage(folder: Path, what: str) -> None:
    """Changes or removes a file of a step of one shard."""
    (shard,), (index,) = (folder / "shards").iterdir(), folder.glob("index-*")
    path = {"manifest": folder / "manifest.json", "index": index}.get(what, shard)
    if what == "missing":
        path.unlink()
    else:
        flip(path, path.stat().st_size // 2)


def upload(near: Path, far: Any) -> sp.ShardproofError | None:
    """Uploads pending steps, as a restarted job does, and returns the error."""
    run = checkpointer(near, far)
    try:
        run.restore(blank())
        run.wait_for_uploads(WAIT)
    except sp.ShardproofError as error:
        return error
    return None
