"""A connection to the store with the thread that runs its requests, and the requests themselves.

Every `torch.distributed` store answers these requests. `Store.clone` makes another client in newer versions
of torch. For older ones, `new_client` makes it from what Python can read of a store.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from shardproof.engine.rendezvous.wire import WrongBytes

Answer = TypeVar("Answer")
Idle: TypeAlias = "tuple[Callable[[Any], None], Callable[[], float]]"


class LinkLost(Exception):
    """The store refused a request, closed the connection, or does not answer."""


class Link:
    """Runs requests on one connection, in order. No other thread enters the store's client.

    The client holds a lock while it waits for the server, and waits without limit for a stopped server. So
    callers wait for a future, which they can give up, and which Ctrl-C interrupts. The thread is a daemon: a
    request that never returns does not keep the process alive.

    Args:
        open_connection: makes the connection on the link's thread. The link then drops its reference to it.
        name: the name of the thread.
        idle: a function that runs on the connection between requests, and one that gives the seconds between
            two runs.
    """

    def __init__(self, open_connection: Callable[[], Any], name: str, idle: Idle | None = None) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=([open_connection], self._requests, idle), name=name, daemon=True
        )
        self._thread.start()

    def submit(self, request: Callable[[Any], Answer]) -> Future[Answer]:
        """Run a request after the earlier ones. Does not wait."""
        future: Future[Answer] = Future()
        self._requests.put((request, future))
        return future

    def call(self, request: Callable[[Any], Answer], patience: float) -> Answer:
        """Run a request and wait for its result.

        Raises:
            LinkLost: the request failed, or had no result after `patience` seconds.
        """
        return wait_in_steps(self.submit(request), patience)

    def close(self, patience: float = 1.0) -> None:
        """End the thread after the earlier requests. Waits for it, at most `patience` seconds."""
        self._requests.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(patience)


_Request: TypeAlias = "tuple[Callable[[Any], Any], Future[Any]]"


_STEPS = 8
"""Steps of a wait."""


def wait_in_steps(future: Future[Answer], patience: float) -> Answer:
    """Waits for the future's result, in several steps.

    If this process is stopped meanwhile, at most one step expires.

    Raises:
        LinkLost: the request failed, or had no result after `patience` seconds.
        WrongBytes: the request read a value that this package does not write.
    """
    for _ in range(_STEPS):
        try:
            return future.result(patience / _STEPS)
        except Exception as error:
            if future.done() and future.exception() is error:
                if isinstance(error, WrongBytes):
                    raise
                text = str(error).strip().split("\n", 1)[0]
                raise LinkLost(f"{type(error).__name__}: {text}") from error
    raise LinkLost(f"no answer for {patience:.1f} s")


def is_over(waiting: Future[Any], seconds: float) -> bool:
    """True if the wait ends within so many seconds.

    Raises:
        LinkLost, WrongBytes: the request failed.
    """
    try:
        waiting.result(seconds)
    except NotYet:
        return False
    except Exception:
        wait_in_steps(waiting, seconds)  # raises the reason
    return True


def _serve(
    opener: list[Callable[[], Any]], requests: queue.SimpleQueue[_Request | None], idle: Idle | None
) -> None:
    connection = None
    last = time.monotonic()
    while True:
        try:
            item = requests.get(
                timeout=None if idle is None else max(last + idle[1]() - time.monotonic(), 0.0)
            )
        except queue.Empty:
            pass
        else:
            if item is None:
                return
            request, future = item
            try:
                if connection is None:
                    connection = opener[0]()
                    opener.clear()
                future.set_result(request(connection))
            except BaseException as error:
                future.set_exception(error)
            del item, request, future  # keep no object alive while this thread waits
        if idle is not None and time.monotonic() - last >= idle[1]():
            last = time.monotonic()
            if connection is not None:
                try:
                    idle[0](connection)
                except Exception:
                    pass  # the next request reports a lost connection to its caller


BATCH = 256
"""Keys in one request."""
_LONG_WAIT = timedelta(hours=1)
"""Timeout of one wait. It is long, because the client logs a warning at each timeout. A wait normally ends
much earlier, when a rank sets the key."""
FEW = 3
"""Up to this many keys are read one by one, with one trip to the server each. A batch takes three trips or
more."""
_NOTHING = "(nothing)"
"""A value that is neither a record nor a sign of life."""


def wait(store: Any, key: str) -> None:
    """Wait until a key exists."""
    while True:
        began = time.monotonic()
        try:
            store.wait([key], _LONG_WAIT)
            return
        except RuntimeError:
            # Older stores raise one error for a timeout and for a lost connection. Only a timeout takes long.
            if time.monotonic() - began < 0.9 * _LONG_WAIT.total_seconds():
                raise


def peek(store: Any, key: str) -> bytes | None:
    """Returns the value of a key; None if it does not exist.

    Takes one trip to the server; a check and a read take three. The function calls compare-and-set and
    expects a value that no key has, so the call writes nothing. Every store answers with the value of the
    key, or with the expected value if the key does not exist. On the libuv server of `TCPStore`, the call may
    end a wait for the key. So no rank may wait for a key that any rank peeks at.
    """
    found = bytes(store.compare_set(key, _NOTHING, _NOTHING))
    return None if found == _NOTHING.encode() else found


def present(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """The values of those keys that exist, found by halving: few requests if few keys are missing."""
    if len(keys) <= FEW:
        peeked = {rank: peek(store, key) for rank, key in keys.items()}
        return {rank: value for rank, value in peeked.items() if value is not None}
    found: list[int] = []
    groups = [list(keys)] if keys else []
    while groups:
        group = groups.pop()
        if store.check([keys[rank] for rank in group]):
            found += group
        elif len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return values(store, {rank: keys[rank] for rank in found})


def values(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """The values of keys that exist."""
    ranks = list(keys)
    found: dict[int, bytes] = {}
    for start in range(0, len(ranks), BATCH):
        batch = ranks[start : start + BATCH]
        found.update(zip(batch, map(bytes, store.multi_get([keys[rank] for rank in batch])), strict=True))
    return found


def set_all(store: Any, items: Mapping[str, bytes]) -> None:
    """Set many keys, in batches."""
    keys = list(items)
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        store.multi_set(batch, [items[key] for key in batch])


def delete(store: Any, keys: Sequence[str]) -> None:
    """Delete keys. A key may be missing."""
    for key in keys:
        store.delete_key(key)


_PREFIX_KEY = "shardproof/prefix"


def new_client(store: Any) -> Any:
    """A client of the same store, with the same keys for all ranks.

    Waits of one client do not block another one. A `HashStore` has no clients, and is returned itself.

    Args:
        store: a store of `torch.distributed`, or an object with a method `clone`.

    Raises:
        TypeError: the store has no method `clone`, and is of an unknown class.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("key", "value")
        >>> new_client(store).get("key")
        b'value'
    """
    return store.clone() if hasattr(store, "clone") else _connect_again(store)


def _connect_again(store: Any) -> Any:
    """As `new_client`, without `Store.clone`.

    Python cannot read the prefix of a `PrefixStore`. The clients of one use another prefix, which the first
    of them stores there for all ranks.
    """
    import torch.distributed

    dist: Any = torch.distributed

    if isinstance(store, dist.PrefixStore):
        prefix = bytes(store.compare_set(_PREFIX_KEY, "", uuid.uuid4().hex)).decode()
        return dist.PrefixStore(prefix, _connect_again(store.underlying_store))
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(
            store.host,
            store.port,
            is_master=False,
            timeout=store.timeout,
            wait_for_workers=False,
            use_libuv=store.libuvBackend,
        )
    if isinstance(store, dist.FileStore):
        return dist.FileStore(store.path)
    if isinstance(store, dist.HashStore):
        return store
    raise TypeError(
        f"a rendezvous needs a client of its own, and a {type(store).__name__} has no method clone in "
        "this version of torch. Use a TCPStore, a FileStore, a HashStore or a PrefixStore of one"
    )
