"""Who reaches the port of a node without its secret holds up no rank, and learns and changes nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

import shardproof as sp
from shardproof.errors import StorageError
from shardproof.rendezvous import StoreRendezvous
from shardproof.runs.checkpointer.nodes import file_service, join_nodes
from shardproof.runs.checkpointer.nodes.file_service import FileService
from shardproof.runs.checkpointer.nodes.node_group import (
    NodeGroup,
    chosen_address,
    combined_secret,
    own_secret,
)
from shardproof.runs.checkpointer.nodes.peer_frames import PeerConnection
from shardproof.runs.checkpointer.nodes.peer_storage import Peer, PeerStorage
from shardproof.storage import LocalStorage

OF_STORE, OF_USER = b"s" * 32, b"u" * 32


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FileService]:
    (tmp_path / "a").write_bytes(b"1")
    service = FileService(LocalStorage(tmp_path), lambda: 60.0, "127.0.0.1")
    service.start(combined_secret(OF_STORE, OF_USER))
    yield service
    service.stop()


def peer(service: FileService, secret: bytes) -> PeerStorage:
    return PeerStorage(Peer(["127.0.0.1"], service.port, service.name, secret, "node 1", lambda: 60.0), "")


def test_silent_connections_leave_threads_and_room_for_the_ranks(service: FileService) -> None:
    with ExitStack() as silent:
        for _ in range(150):
            silent.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=60))
        ours = peer(service, combined_secret(OF_STORE, OF_USER))
        assert ours.read("a") == b"1"
        serving = [thread for thread in threading.enumerate() if thread.name == "shardproof-file"]
        assert len(serving) < 70, "64 that prove nothing, and those that end"
    assert ours.read("a") == b"1"


def test_a_proof_that_does_not_come_ends_the_connection(tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    theirs = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    theirs.sendall(b"x" * 31)  # one byte less than a challenge
    with pytest.raises(TimeoutError):
        PeerConnection(accepted, 3600.0).prove(OF_STORE, b"name", asks=False, seconds=0.1)
    for one in (theirs, server):
        one.close()


def test_a_service_ends_a_connection_that_proves_nothing(
    service: FileService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait of the run takes a minute here, and the proof may not take as long."""
    monkeypatch.setattr(file_service, "_PROOF_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as silent:
        while silent.recv(64):
            pass  # the challenge; then the service closes the connection


def test_the_secret_of_the_store_alone_opens_nothing(service: FileService, tmp_path: Path) -> None:
    stranger = peer(service, OF_STORE)
    for call in (
        lambda: stranger.read("a"),
        lambda: stranger.delete("a"),
        lambda: stranger.publish("b", b""),
    ):
        with pytest.raises(sp.StorageError, match="cannot be reached"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_the_secret_of_the_user_comes_from_a_file_or_a_variable(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    variable, file = "SHARDPROOF_NODES_SECRET", "SHARDPROOF_NODES_SECRET_FILE"
    assert own_secret({file: str(tmp_path / "secret")}) == own_secret({variable: "0123456789abcdef"})
    with pytest.raises(sp.StorageError, match="15 bytes, expected 16 to 4096"):
        own_secret({variable: "0123456789abcde"})
    with pytest.raises(sp.StorageError, match="both set"):
        own_secret({variable: "0123456789abcdef", file: str(tmp_path / "secret")})
    with pytest.raises(sp.StorageError, match=r"nothing.*cannot be read"):
        own_secret({file: str(tmp_path / "nothing")})


def test_the_interface_is_one_of_this_machine(service: FileService, tmp_path: Path) -> None:
    assert chosen_address({"SHARDPROOF_NODES_INTERFACE": "lo"}) == "127.0.0.1"
    with pytest.raises(sp.StorageError, match=r"no such interface .* It has .*lo"):
        chosen_address({"SHARDPROOF_NODES_INTERFACE": "nothing0"})
    for address in ("0.0.0.0", "::"):
        with pytest.raises(StorageError, match="no address that other nodes can connect to"):
            chosen_address({"SHARDPROOF_NODES_INTERFACE": address})
    everywhere = FileService(LocalStorage(tmp_path), lambda: 60.0)
    for one, is_reached in ((everywhere, True), (service, False)):
        try:
            socket.create_connection(("127.0.0.2", one.port), timeout=10).close()
            assert is_reached
        except OSError:
            assert not is_reached
    everywhere.stop()


def test_nodes_listen_and_are_reached_at_the_chosen_interface_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDPROOF_NODES_INTERFACE", "127.0.0.2")
    store = HashStore()

    def join(rank: int) -> NodeGroup:
        meetings = StoreRendezvous(store, rank, 2, deadline=20.0)
        return join_nodes(meetings, LocalStorage(tmp_path / f"node{rank}"), 0)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(join, range(2))
    (tmp_path / "node1" / "a").write_bytes(b"1")
    assert first.folders[1].read("a") == b"1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", second.service.port), timeout=10)
    for group in (first, second):
        group.service.stop()
