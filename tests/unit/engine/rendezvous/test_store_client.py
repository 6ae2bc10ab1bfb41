"""Clients of a store that are made without `Store.clone`, as for older versions of torch."""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from shardproof.engine.rendezvous.store_requests import new_client
from shardproof.rendezvous import StoreRendezvous

Make = Callable[[Path], Any]


class _WithoutClone:
    """Hides `clone` of a store, and that of the store below a prefix."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @property  # `isinstance` uses it
    def __class__(self) -> type[Any]:
        return self._store.__class__  # type: ignore[no-any-return]

    @__class__.setter
    def __class__(self, _kind: type[Any]) -> None:
        raise TypeError

    @property
    def underlying_store(self) -> Any:
        return _WithoutClone(self._store.underlying_store)

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        return getattr(self._store, name)


def _tcp(_folder: Path, use_libuv: bool = True) -> TCPStore:
    return TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        use_libuv=use_libuv,
    )


_STORES: dict[str, Make] = {
    "tcp": _tcp,
    "tcp without libuv": lambda folder: _tcp(folder, use_libuv=False),
    "prefix": lambda folder: PrefixStore("a", _tcp(folder)),
    "prefix of a prefix": lambda folder: PrefixStore("a", PrefixStore("b", _tcp(folder))),
    "file": lambda folder: FileStore(str(folder / "store"), 2),
    "hash": lambda _folder: HashStore(),
}


@pytest.mark.parametrize("kind", _STORES)
def test_clients_share_the_keys_of_a_store(kind: str, tmp_path: Path) -> None:
    store = _WithoutClone(_STORES[kind](tmp_path))
    first, second = new_client(store), new_client(store)
    first.set("key", "value")
    assert second.get("key") == b"value"
    third = new_client(_WithoutClone(second))
    new_client(_WithoutClone(first)).set("other", "too")
    assert third.get("other") == b"too"


def test_clients_of_two_prefixes_share_no_keys(tmp_path: Path) -> None:
    server = _tcp(tmp_path)
    one, other = (new_client(_WithoutClone(PrefixStore(name, server))) for name in ("job 1", "job 2"))
    one.set("key", "value")
    assert not other.check(["key"])


def test_a_wait_of_one_client_blocks_no_other_one(tmp_path: Path) -> None:
    store = _WithoutClone(_tcp(tmp_path))
    waiting, other = new_client(store), new_client(store)
    thread = threading.Thread(target=waiting.wait, args=(["key"],))
    thread.start()
    other.set("another", "value")
    assert other.get("another") == b"value"
    other.set("key", "value")
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", _STORES)
def test_ranks_meet(kind: str, tmp_path: Path) -> None:
    store = _STORES[kind](tmp_path)
    ranks = [StoreRendezvous(_WithoutClone(store), rank, 2, deadline=30.0) for rank in range(2)]
    answers: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: answers.append(ranks[rank].meet("save", "plan", b"%d" % rank, b"".join))
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in ranks:
        each.close()
    assert answers == [b"01", b"01"]


def test_a_store_of_another_class_is_refused() -> None:
    class Other:
        """A store of a program."""

    with pytest.raises(TypeError, match="an? Other has no method clone"):
        new_client(Other())
