"""More clients of a `torch.distributed` store.

`Store.clone` makes one in newer versions of torch. For older ones, a client is made here from what Python can
read of a store.
"""

from __future__ import annotations

import uuid
from typing import Any

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
