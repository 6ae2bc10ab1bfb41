"""A storage that raises an error or calls a hook at its k-th operation."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from shardproof.storage import Sink, Storage

__all__ = ["FaultyStorage", "kill_self"]

T = TypeVar("T")

Hook = Callable[[str, str], None]
"""Called with the operation ("create", "write_at", ...) and the file's name."""


class FaultyStorage(Storage):
    """`inner`, with a fault before its `at`-th operation, counted from 0 over all sinks and parts.

    Args:
        inner: the storage that does the work.
        at: number of the operation; None: no fault, only count; or a function: a fault at each operation
            for which it returns true.
        fault: raised, if an exception; called with operation and name, if a hook.
        only: operations that count; None: all. Those of sinks are "write_at", "finish" and "abort".
        after: do the operation first, then the fault.

    `operations` lists every operation that counted, also those of storages from `within` and `sibling`.
    """

    def __init__(
        self,
        inner: Storage,
        at: int | Callable[[], bool] | None = None,
        fault: BaseException | Hook | None = None,
        *,
        only: tuple[str, ...] | None = None,
        after: bool = False,
    ) -> None:
        self._inner = inner
        self._prefix = ""
        self._trigger = _Trigger(at, fault, only, after)

    def arm(
        self,
        at: int | Callable[[], bool] | None,
        fault: BaseException | Hook | None = None,
        *,
        only: tuple[str, ...] | None = None,
        after: bool = False,
    ) -> None:
        """Counts from 0 again, with another fault; for storages from `within` and `sibling`, too."""
        self._trigger.arm(at, fault, only, after)

    def disarm(self) -> None:
        """Only counts from now on."""
        self._trigger.arm(None, None, None, False)

    @property
    def operations(self) -> list[tuple[str, str]]:
        """Operation and name, in order."""
        return self._trigger.seen

    @property
    def location(self) -> str:
        return self._inner.location

    @property
    def folder(self) -> str:
        return self._inner.folder

    @property
    def linked(self) -> bool:
        return self._inner.linked

    def create(self, name: str) -> Sink:
        sink = self._do("create", name, lambda: self._inner.create(name))
        return _FaultySink(sink, self._prefix + name, self._trigger)

    def replace(self, name: str) -> Sink:
        """Counts as "create"."""
        sink = self._do("create", name, lambda: self._inner.replace(name))
        return _FaultySink(sink, self._prefix + name, self._trigger)

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        self._do("publish", name, lambda: self._inner.publish(name, data, replace=replace))

    def flush(self, name: str) -> None:
        self._do("flush", name, lambda: self._inner.flush(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._do("read", name, lambda: self._inner.read(name, start, stop))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._do("read_into", name, lambda: self._inner.read_into(name, start, buffer))

    def size(self, name: str) -> int | None:
        return self._do("size", name, lambda: self._inner.size(name))

    def list(self, prefix: str = "") -> list[str]:
        return self._do("list", prefix, lambda: self._inner.list(prefix))

    def folders(self) -> list[str]:
        return self._do("folders", "", self._inner.folders)

    def delete(self, name: str) -> None:
        self._do("delete", name, lambda: self._inner.delete(name))

    def within(self, prefix: str) -> FaultyStorage:
        part = FaultyStorage(self._inner.within(prefix))
        part._prefix = f"{self._prefix}{prefix}/"
        part._trigger = self._trigger
        return part

    def sibling(self, folder: str) -> FaultyStorage:
        beside = FaultyStorage(self._inner.sibling(folder))
        above = self._prefix.removesuffix("/").rpartition("/")[0] if self._prefix else ".."
        beside._prefix = f"{above}/{folder}/" if above else f"{folder}/"
        beside._trigger = self._trigger
        return beside

    def siblings(self) -> list[str]:
        return self._do("siblings", "", self._inner.siblings)

    def close(self) -> None:
        self._inner.close()

    def _do(self, operation: str, name: str, work: Callable[[], T]) -> T:
        return self._trigger.run(operation, self._prefix + name, work)


def kill_self(operation: str, name: str) -> None:
    """A hook that ends this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


class _FaultySink:
    def __init__(self, inner: Sink, name: str, trigger: _Trigger) -> None:
        self._inner = inner
        self._name = name
        self._trigger = trigger

    def write_at(self, start: int, buffer: memoryview) -> None:
        self._trigger.run("write_at", self._name, lambda: self._inner.write_at(start, buffer))

    def finish(self, size: int) -> None:
        self._trigger.run("finish", self._name, lambda: self._inner.finish(size))

    def abort(self) -> None:
        self._trigger.run("abort", self._name, self._inner.abort)


class _Trigger:
    """Counts operations of all threads, and fires at those that are due."""

    def __init__(
        self,
        at: int | Callable[[], bool] | None,
        fault: BaseException | Hook | None,
        only: tuple[str, ...] | None,
        after: bool,
    ) -> None:
        self._lock = threading.Lock()
        self.arm(at, fault, only, after)

    def arm(
        self,
        at: int | Callable[[], bool] | None,
        fault: BaseException | Hook | None,
        only: tuple[str, ...] | None,
        after: bool,
    ) -> None:
        with self._lock:
            self.seen: list[tuple[str, str]] = []
            self._at, self._fault, self._only, self._after = at, fault, only, after

    def run(self, operation: str, name: str, work: Callable[[], T]) -> T:
        due = self._due(operation, name)
        if due and not self._after:
            self._fire(operation, name)
        result = work()
        if due and self._after:
            self._fire(operation, name)
        return result

    def _due(self, operation: str, name: str) -> bool:
        if self._only is not None and operation not in self._only:
            return False
        with self._lock:
            self.seen.append((operation, name))
            return self._at() if callable(self._at) else len(self.seen) - 1 == self._at

    def _fire(self, operation: str, name: str) -> None:
        if isinstance(self._fault, BaseException):
            raise self._fault
        if self._fault is not None:
            self._fault(operation, name)
