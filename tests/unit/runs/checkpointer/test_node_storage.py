"""The folders of several nodes as one storage, in one process: places of files, and failed nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch

import shardproof as sp
from shardproof.checkpointer import delete_steps, plan_removal
from shardproof.engine.format import flush_manifests_in
from shardproof.maintenance import verify
from shardproof.rendezvous import LocalRendezvous
from shardproof.runs.checkpointer.judge import is_damage
from shardproof.runs.checkpointer.nodes import MissingCopies, NodeGroup, NodeStorage, NodesView
from shardproof.runs.checkpointer.nodes.file_service import FileService
from shardproof.runs.checkpointer.nodes.peer_frames import PIECE_BYTES, PeerConnection, PeerRequest
from shardproof.runs.checkpointer.nodes.peer_storage import Peer, PeerStorage, ask_all
from shardproof.runs.checkpointer.step_selection import StepSelection
from shardproof.runs.checkpointer.tiers import Uploader
from shardproof.storage import LocalStorage
from shardproof.storage.conformance import StorageConformance
from tests.scenarios.states import attempt
from tests.soak.disk import Disk
from tests.thread_limit import limit_threads

SECRET = b"s" * 32


class Nodes:
    """Some folders with a service each, and the storage that a rank on one of them has."""

    def __init__(self, root: Path, count: int, patience: float = 30.0) -> None:
        self.folders = [LocalStorage(root / f"node-{number}") for number in range(count)]
        self.services = []
        for folder in self.folders:
            folder.path.mkdir(parents=True)
            self.services.append(FileService(folder, lambda: patience))
            self.services[-1].start(SECRET)
        self.patience = patience

    def peer(self, number: int, *, secret: bytes = SECRET) -> Peer:
        service = self.services[number]
        label = f"node {number} (host, {number})"
        return Peer(["127.0.0.1"], service.port, service.name, secret, label, lambda: self.patience)

    def storage(self, replicas: int = 0, arbiter: int = 0, own: int = 0) -> NodeStorage:
        folders = [
            folder if number == own else PeerStorage(self.peer(number), folder.location)
            for number, folder in enumerate(self.folders)
        ]
        group = NodeGroup(
            own,
            folders,
            range(len(folders)),
            self.folders[0].location,
            arbiter,
            replicas,
            FileService(self.folders[own], lambda: self.patience),
            LocalRendezvous(),
        )
        return NodeStorage(group)

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
        return PeerStorage(nodes.peer(1), nodes.folders[1].location)


class TestNodeStorage(StorageConformance):
    """The folders of three nodes together, with and without copies, published first here or elsewhere."""

    @pytest.fixture(params=[(0, 0), (1, 2)], ids=["no copies", "copies"])
    def storage(self, nodes: Nodes, request: pytest.FixtureRequest) -> NodeStorage:
        return nodes.storage(*request.param)


def test_a_file_is_on_the_node_of_its_rank_and_on_the_partner(nodes: Nodes) -> None:
    for replicas, own in ((0, 1), (1, 2)):
        storage = nodes.storage(replicas, own=own)
        write(storage, f"step-00000001/shards/0000{own}-a.safetensors", b"bytes")
        storage.publish(f"step-00000001/{replicas}.json", b"{}")
    held = [folder.list() for folder in nodes.folders]
    published = ["step-00000001/0.json", "step-00000001/1.json"]
    first, second = (f"step-00000001/shards/0000{own}-a.safetensors" for own in (1, 2))
    assert held == [[*published, second], [*published, first], [*published, second]]
    everywhere = nodes.storage()
    assert everywhere.list() == [*published, first, second]
    for name in (first, second, *published):
        everywhere.delete(name)
    assert [folder.list() for folder in nodes.folders] == [[], [], []]


@pytest.mark.parametrize("step", [1, None])
def test_a_restore_names_stale_and_emptied_nodes(nodes: Nodes, step: int | None) -> None:
    for folder in nodes.folders[:2]:
        sp.Checkpointer(folder.path, rendezvous=LocalRendezvous()).save(1, {"w": torch.ones(4)}).result()
    chosen = StepSelection(NodesView(nodes.storage().group, None), suspect=False).choose_after((), step, None)
    stale, emptied = sorted(chosen.passed, key=lambda item: item.reason, reverse=True)
    assert "is stale" in stale.reason and stale.tier.endswith("node-0")
    assert "new, or was emptied" in emptied.reason and emptied.tier.endswith("node-2")


@pytest.mark.parametrize("chance", range(4))
def test_names_are_flushed_on_every_node(tmp_path: Path, chance: int) -> None:
    """On each node, a process replaced the manifest and died before it flushed the folder."""
    (tmp_path / "disk").mkdir()
    with Disk(tmp_path / "disk") as disk:
        nodes = Nodes(disk.folder, 3)
        try:
            storage = nodes.storage()
            storage.publish("step-00000002/manifest.json", b"old")
            for folder in nodes.folders:
                draft = folder.path / "step-00000002" / "draft"
                file = os.open(draft, os.O_WRONLY | os.O_CREAT)
                os.pwrite(file, b"new", 0)
                os.fsync(file)
                os.close(file)
                os.replace(draft, draft.with_name("manifest.json"))
            flush_manifests_in(storage)
        finally:
            nodes.stop()
        disk.restart("power", Random(chance))
        manifests = [folder.path / "step-00000002" / "manifest.json" for folder in nodes.folders]
        assert [manifest.read_bytes() for manifest in manifests] == [b"new"] * 3


def write(storage: sp.storage.Storage, name: str, data: bytes) -> None:
    sink = storage.create(name)
    sink.write_at(0, memoryview(data))
    sink.finish(len(data))


def test_only_one_of_two_jobs_on_the_same_nodes_publishes(nodes: Nodes) -> None:
    """Rank 0 of each job is on another node, and both publish at the same time."""
    jobs = [nodes.storage(arbiter=1, own=own) for own in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        for number in range(30):
            name = f"step-{number:08d}/manifest.json"
            ready = threading.Barrier(2)

            def publish(job: int, name: str = name, ready: threading.Barrier = ready) -> bool:
                ready.wait()
                try:
                    jobs[job].publish(name, b"%d" % job)
                except sp.AlreadyCommittedError:
                    return False
                return True

            won = list(pool.map(publish, (0, 1)))
            assert won.count(True) == 1
            assert {folder.read(name) for folder in nodes.folders} == {b"%d" % won.index(True)}


def test_the_error_of_a_publication_that_misses_a_node_says_that_it_is_in_place(nodes: Nodes) -> None:
    storage = nodes.storage()
    nodes.services[2].stop()
    with pytest.raises(sp.StorageError, match="is in place on .*, and not on all nodes: node 2") as caught:
        storage.publish("step-00000001/manifest.json", b"{}", replace=True)
    assert caught.value.details["in_place"] is True
    assert nodes.folders[0].read("step-00000001/manifest.json") == b"{}"


def test_the_service_serves_its_folder_and_nothing_else(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"outside")
    peer = nodes.peer(1)
    for do in ("read", "size", "delete", "flush", "create", "publish", "list", "folders"):
        for folder, name in ((b"..", b"secret"), (b"", b"../secret"), (b"/", bytes(tmp_path / "secret"))):
            if do == "folders" and not folder:
                continue
            with pytest.raises(sp.StorageError, match="cannot name a file"):
                peer.ask(PeerRequest(do, folder, name))
    assert (tmp_path / "secret").read_bytes() == b"outside"


def test_a_rank_without_the_secret_is_refused_and_learns_nothing(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.folders[1].publish("a", b"1")
    stranger = PeerStorage(nodes.peer(1, secret=b"x" * 32), "")
    with pytest.raises(sp.StorageError, match="node 1 .*cannot be reached"):
        stranger.read("a")
    # A peer that mirrors the challenge proves nothing and gets no answer.
    with socket.create_connection(("127.0.0.1", nodes.services[1].port), timeout=10) as mirror:
        mirror.sendall(mirror.recv(32))
        assert mirror.recv(64) == b""
    assert PeerStorage(nodes.peer(1), "").read("a") == b"1"


def test_a_service_that_cannot_start_a_thread_closes_the_connection_and_continues(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.folders[1].publish("a", b"1")
    with monkeypatch.context() as limited:
        limit_threads(limited)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", nodes.services[1].port), timeout=10) as caller:
                assert caller.recv(1) == b""
    assert PeerStorage(nodes.peer(1), "").read("a") == b"1"
    assert caplog.text.count(f"{nodes.folders[1].location}: this process cannot serve another rank") == 1


def test_a_service_without_descriptors_accepts_the_connection_later(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    warning = f"{nodes.folders[1].location}: this process cannot serve another rank: [Errno 24]"
    with socket.socket() as caller:
        caller.settimeout(10)
        free = os.dup(0)
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
            caller.connect(("127.0.0.1", nodes.services[1].port))
            ends = time.monotonic() + 10
            while warning not in caplog.text:
                assert time.monotonic() < ends
                threading.Event().wait(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert len(caller.recv(32)) > 0, "the service answers"
    assert caplog.text.count(warning) == 1


def test_bytes_that_change_in_transit_are_not_stored(nodes: Nodes) -> None:
    peer = nodes.peer(1)
    connection = peer.take()
    connection.send(PeerRequest("create", b"", b"a"))
    peer.answer(connection)
    connection.send(PeerRequest("write", count=3, digest=b"0" * 16), b"abc")
    with pytest.raises(sp.StorageError, match="3 bytes from byte 0 on changed on the way"):
        peer.answer(connection)
    connection.close()
    assert nodes.folders[1].list() == []


def test_the_copy_of_a_rank_that_dies_is_removed(nodes: Nodes) -> None:
    sink = PeerStorage(nodes.peer(1), "").create("shards/a")
    sink.write_at(0, memoryview(bytes(2 * PIECE_BYTES + 5)))
    sink._connection.close()  # what the end of a process does
    for _ in range(1000):
        if not nodes.folders[1].list():
            break
        threading.Event().wait(0.01)
    assert nodes.folders[1].list() == []


def test_an_error_of_the_copy_reaches_the_writer_early(nodes: Nodes) -> None:
    """The other node refuses the first piece, and the writer does not send all the others."""
    storage = PeerStorage(nodes.peer(1), "")
    sink = storage.create("a")
    sink.write_at(2**63 - 1, memoryview(b"0"))  # no file has such an offset
    kind = ""
    for start in range(1000):
        threading.Event().wait(0.01)
        kind = attempt(lambda start=start: sink.write_at(start, memoryview(b"0"))).kind  # type: ignore[misc]
        if kind:
            break
    assert kind == "StorageError"
    sink.abort()
    assert nodes.folders[1].list() == []


def test_every_call_to_a_silent_node_ends_in_time(tmp_path: Path) -> None:
    """A service accepts, proves itself and never answers."""
    silent = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def accept() -> None:
        while not ended.is_set():
            accepted, _ = silent.accept()
            connections.append(connection := PeerConnection(accepted, 10.0))
            with contextlib.suppress(OSError):
                connection.prove(SECRET, b"name", asks=False)

    connections: list[PeerConnection] = []
    threading.Thread(target=accept, daemon=True).start()
    peer = Peer(["127.0.0.1"], silent.getsockname()[1], "name", SECRET, "node 1 (host, 1)", lambda: 0.2)
    storage = PeerStorage(peer, "/run")
    calls = (
        lambda: storage.size("a"),
        lambda: storage.read("a"),
        lambda: storage.create("a"),
        lambda: storage.publish("a", b"1"),
        lambda: ask_all([peer, peer], PeerRequest("size", b"", b"a")),
    )
    for call in calls:
        began = time.monotonic()
        with pytest.raises(sp.StorageError, match="node 1 .* does not answer within 0.2 s") as caught:
            call()
        assert time.monotonic() - began < 5
        assert not is_damage(caught.value)  # so that no older step is restored
    ended.set()
    silent.close()


class SlowAtTheEnd(PeerStorage):
    """Another node, with a call after a copy has read the last bytes of a shard file.

    Args:
        peer: see `PeerStorage`.
        root: see `PeerStorage`.
        path: see `PeerStorage`.
        at_the_end: the call.
    """

    def __init__(self, peer: Peer, root: str, path: str, at_the_end: Callable[[], object]) -> None:
        super().__init__(peer, root, path)
        self.at_the_end = at_the_end
        self.ends = 0
        """Reads up to the end of a shard file: of its digests, and then of its last bytes."""

    def within(self, prefix: str) -> PeerStorage:
        return SlowAtTheEnd(self.peer, self._root, prefix, self.at_the_end)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().read(name, start, stop)
        self.ends += name.startswith("shards/") and stop == self.size(name)
        if self.ends == 2:
            self.at_the_end()
        return data


def lacking_copies(
    nodes: Nodes, at_the_end: Callable[[], object], deadline: float = 60.0
) -> tuple[NodeStorage, MissingCopies, bytes]:
    """Step 1, whose files only node 1 has, and the copies that a rank on node 0 is to make.

    Args:
        nodes: three nodes.
        at_the_end: called by the copy of a shard file after the last bytes were read.
        deadline: of the rendezvous.
    """
    own, other, _ = nodes.folders
    sp.save(other.within("step-00000001"), {"w": torch.arange(1000.0)}, step=1)
    text = other.read("step-00000001/manifest.json")
    own.publish("step-00000001/manifest.json", text)
    storage = nodes.storage(replicas=1)
    source = SlowAtTheEnd(nodes.peer(1), other.location, "", at_the_end)
    storage.group.folders = (own, source, storage.group.folders[2])
    copies = MissingCopies(storage, LocalRendezvous(deadline=deadline))
    (share,) = copies.plan("step-00000001", text, {})
    return storage, copies, share


def test_a_copy_that_hangs_ends_the_wait(nodes: Nodes) -> None:
    goes_on = threading.Event()
    _, copies, share = lacking_copies(nodes, goes_on.wait, deadline=0.2)
    copies.begin(share)
    with pytest.raises(sp.StorageError, match="have made no progress for 0 s"):
        copies.wait(None)
    goes_on.set()
    copies.wait(60)
    assert nodes.folders[0].list() == nodes.folders[1].list()


@pytest.mark.parametrize("knows_the_draft", [False, True])
def test_a_copy_of_a_step_that_is_removed_meanwhile_does_not_stay(
    nodes: Nodes, knows_the_draft: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 1 alone has the files, and the rank on node 0 copies them. The removal may know its draft."""
    own, other, _ = nodes.folders
    storage, copies, share = lacking_copies(nodes, lambda: remove())
    listed = plan_removal(storage, ["step-00000001"])

    def remove() -> None:
        if knows_the_draft:
            delete_steps(storage, ["step-00000001"])
        else:
            for name in (*listed.manifests, *listed.files):
                storage.delete(name)

    copies.begin(share)
    copies.wait(60)
    assert own.list() == other.list() == [] and own.folders() == []
    assert [record.levelname for record in caplog.records] == ["WARNING"], "that files have one copy"


class FailingDevice(LocalStorage):
    """A disk that cannot read the tensors of shard files."""

    def within(self, prefix: str) -> LocalStorage:
        return FailingDevice(self.path / prefix)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if name.startswith("shards/"):
            file = str(self.path / name)
            raise sp.StorageError(f"cannot read {file}: EIO", file=file, errno="EIO", missing=False)
        super().read_into(name, start, buffer)


def test_a_file_on_a_failing_device_is_uploaded_from_its_copy(nodes: Nodes, tmp_path: Path) -> None:
    storage, far = nodes.storage(replicas=1), LocalStorage(tmp_path / "far")
    sp.save(storage.within("step-00000001"), {"w": torch.arange(1000.0)}, step=1)
    storage.group.folders = (FailingDevice(nodes.folders[0].path), *storage.group.folders[1:])
    uploader = Uploader(storage, far, LocalRendezvous(), None, None, set())
    uploader.prepare()
    uploader.begin_round(None)
    uploader.wait_for_all(60)
    assert verify(far.within("step-00000001")).ok


def test_options_that_do_not_fit_are_refused() -> None:
    for root, node_local, text in (
        ("s3://bucket/run", True, "node_local needs a folder on the disk of each node, not s3://bucket"),
        ("s3://bucket/run", sp.NodeLocal(replicas=1), "node_local needs a folder on the disk of each node"),
    ):
        with pytest.raises(ValueError, match=text):
            sp.Checkpointer(root, rendezvous=LocalRendezvous(), node_local=node_local)
    with pytest.raises(ValueError, match="replicas is 0 or 1, not 2"):
        sp.NodeLocal(replicas=2)


def test_one_rank_is_one_node_and_has_no_partner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardproof"):
        run = sp.Checkpointer(tmp_path, node_local=sp.NodeLocal(replicas=1), rendezvous=LocalRendezvous())
    assert "replicas=1 keeps no copies" in caplog.text
    run.save(1, {"n": 1}).result()
    state = {"n": 0}
    assert run.restore(state) == 1 and state == {"n": 1}
    assert run.steps() == [1]


def test_a_warning_says_once_that_no_scrub_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for scrub, warnings in ((None, 0), (1 << 20, 1)):
        incremental = sp.Incremental(scrub=scrub)
        sp.Checkpointer(tmp_path, node_local=True, incremental=incremental, rendezvous=LocalRendezvous())
        assert caplog.text.count("there is no scrub with node_local=True") == warnings


@pytest.mark.parametrize(("patience", "first"), [(30.0, 30), (0.2, 1), (1e9, 32_767)])
def test_the_system_probes_an_idle_connection(patience: float, first: int) -> None:
    """So that the wait for the next request of a node that lost power ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        to = socket.create_connection(server.getsockname())
    connection = PeerConnection(to, patience)
    assert to.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert to.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == first
    connection.close()
