"""The folders of several nodes as one storage, in one process: what is where, and failures of a node."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardproof as sp
from shardproof.checkpointer.nodes import NodeGroup, NodeStorage
from shardproof.checkpointer.nodes.file_service import FileService
from shardproof.checkpointer.nodes.peer_frames import PIECE_BYTES, PeerConnection, Request
from shardproof.checkpointer.nodes.peer_storage import Peer, PeerStorage, ask_all
from shardproof.rendezvous import LocalRendezvous
from shardproof.storage import LocalStorage
from shardproof.storage.conformance import StorageConformance

SECRET = b"s" * 32


class Nodes:
    """Some folders with a service each, as rank 0 on node 0 sees them."""

    def __init__(self, root: Path, count: int, patience: float = 30.0) -> None:
        self.folders = [LocalStorage(root / f"node-{number}") for number in range(count)]
        self.services = []
        for folder in self.folders:
            folder.path.mkdir(parents=True)
            self.services.append(FileService(folder, lambda: patience))
            self.services[-1].start(SECRET)
        self.peers = [
            Peer(
                ["127.0.0.1"],
                one.port,
                one.name,
                SECRET,
                f"node {number} (host, ranks {number})",
                lambda: patience,
            )
            for number, one in enumerate(self.services)
        ]

    def storage(self, replicas: int = 0, arbiter: int = 0) -> NodeStorage:
        folders = [
            self.folders[0],
            *(
                PeerStorage(peer, folder.location)
                for peer, folder in zip(self.peers[1:], self.folders[1:], strict=True)
            ),
        ]
        return NodeStorage(
            NodeGroup(
                0,
                folders,
                range(len(folders)),
                self.folders[0].location,
                arbiter,
                replicas,
                self.services[0],
                LocalRendezvous(),
            )
        )

    def stop(self) -> None:
        for service in self.services:
            service.stop()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, 3)
    yield made
    made.stop()


class TestPeerStorage(StorageConformance):
    """The folder of another node alone."""

    @pytest.fixture
    def storage(self, nodes: Nodes) -> PeerStorage:
        return PeerStorage(nodes.peers[1], nodes.folders[1].location)


class TestNodeStorage(StorageConformance):
    """The folders of three nodes together, with and without copies, published first here or elsewhere."""

    @pytest.fixture(params=[(0, 0), (1, 2)], ids=["no copies", "copies"])
    def storage(self, nodes: Nodes, request: pytest.FixtureRequest) -> NodeStorage:
        return nodes.storage(*request.param)
