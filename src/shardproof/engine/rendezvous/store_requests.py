"""Requests that every `torch.distributed` store answers, made on the thread of a link, and more clients.

`Store.clone` makes a client in newer versions of torch. For older ones, a client is made here from what
Python can read of a store.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

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
