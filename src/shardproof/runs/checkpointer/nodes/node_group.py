"""The nodes of a run on local disks: finds the ranks that share a folder, and connects the nodes.

Note "What a node is": ranks form one node if their folder has the same running system, device and inode. No
variable of a launcher decides it. Nodes are numbered by their lowest ranks. A later job may number them
differently. It still finds its files, because it asks every present node.

Note "Who asks whom": every rank serves the files of its node. A rank asks one rank of each other node, so the
requests spread over the ranks of a node.

Note "The secret of a run": rank 0 draws random bytes, and the ranks learn them at the rendezvous. The store
of the launcher knows no authentication, so every process that reaches it can read them. A secret of the user
never passes through the store. If there is one, the secret of the run is a digest of both.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardproof.engine.rendezvous import MeetingSequence, Rendezvous, format_rank_ranges
from shardproof.engine.storage import LocalStorage, Storage, file_system_number
from shardproof.errors import ShardproofError, StorageError, StructureError
from shardproof.runs.checkpointer.nodes.file_service import FileService
from shardproof.runs.checkpointer.nodes.peer_storage import Peer, PeerStorage
from shardproof.runs.checkpointer.step_folders import NodeMark, write_node_mark

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SECRET, _SECRET_FILE = "SHARDPROOF_NODES_SECRET", "SHARDPROOF_NODES_SECRET_FILE"
_INTERFACE = "SHARDPROOF_NODES_INTERFACE"
_LEAST_SECRET, _MOST_SECRET = 16, 4096
"""Bytes of a secret of the user."""
_SIOCGIFADDR = 0x8915
"""The request of Linux for the IPv4 address of an interface."""

_log = logging.getLogger("shardproof")


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """The report of one rank."""

    place: tuple[str, int, int]
    """The running system, the device and the inode of the folder."""
    location: str
    file_system: int
    """See `FreeSpace.file_system`."""
    replicas: int
    host: str
    addresses: tuple[str, ...]
    port: int
    service: str
    has_secret: bool
    """True if the user gave this rank a secret."""


class _Node(msgspec.Struct, frozen=True, array_like=True):
    """A node, as one rank reaches it."""

    label: str
    name: str
    """Host and folder."""
    location: str
    file_system: int
    addresses: tuple[str, ...]
    port: int
    service: str


class _NodeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one rank."""

    name: str
    secret: bytes
    location: str
    nodes: tuple[_Node, ...]
    node_of_rank: tuple[int, ...]
    arbiter: int


@dataclass(eq=False)
class NodeGroup:
    """The run's folders on all nodes, as this rank reaches them."""

    own: int
    """Number of this rank's node."""
    folders: Sequence[Storage]
    """The run's folder on each node."""
    node_of_rank: Sequence[int]
    """Number of the node of each rank."""
    location: str
    """Location of the run on the node of rank 0; the same on all ranks."""
    arbiter: int
    """Number of the node on which a file is published first."""
    replicas: int
    """Number of other nodes that have a copy of each file, 0 or 1."""
    service: FileService
    """File service of this rank. It ends with this object."""
    meetings: Rendezvous
    """A rendezvous of all ranks."""
    file_systems: Sequence[int] = ()
    """Number of the file system of each folder; see `FreeSpace.file_system`. Empty: not known."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.service.stop)

    def partner_of(self, node: int) -> int | None:
        """The node with the second copy of the files of `node`; None without `replicas` or with one node."""
        if not self.replicas or len(self.folders) == 1:
            return None
        return (node + 1) % len(self.folders)

    def end_barrier(self, what: str, answers: Sequence[bytes] = ()) -> bytes:
        """A barrier of all ranks. After it, no rank reads files of another node for this save or restore.

        A failure is logged and loses nothing. At worst, old steps stay on the node of a rank that left early.
        By the name `what`, a rank that missed an earlier barrier finds this one.

        Returns:
            This rank's answer, of those that rank 0 passes; empty after a failure.
        """
        meeting = MeetingSequence(self.meetings, f"nodes of {self.location}, {what}")
        try:
            return meeting.meet("part", bytes, lambda posts: answers or b"")
        except ShardproofError as error:
            _log.warning("%s: the barrier at the end of a save or restore failed: %s", self.location, error)
            return b""


def join_nodes(rendezvous: Rendezvous, root: LocalStorage, replicas: int) -> NodeGroup:
    """Finds the nodes of a run. All ranks call it.

    Args:
        rendezvous: rendezvous of all ranks.
        root: the run's folder on the node of this rank. It is made if it does not exist.
        replicas: see `NodeGroup`.

    Raises:
        StructureError: ranks pass different `replicas`.
        RankFailure, RankSilent: a rank failed or fell silent.

    Example:
        >>> import tempfile
        >>> from shardproof.rendezvous import LocalRendezvous
        >>> group = join_nodes(LocalRendezvous(), LocalStorage(tempfile.mkdtemp()), 0)
        >>> len(group.folders), group.node_of_rank
        (1, (0,))
    """

    def patience() -> float:
        # Shorter than the deadline, so that all ranks learn which node is silent and not that rank 0 waits.
        return rendezvous.deadline / 2

    joining = _NodeJoining(root, replicas, patience)
    operation = "nodes of this run"
    try:
        with rendezvous.operation(operation):
            answer = MeetingSequence(rendezvous, operation).exchange_each(
                "join", joining.report, _decide, _Report, _NodeAnswer
            )
    except BaseException:
        if joining.service is not None:
            joining.service.stop()
        raise
    service = joining.service
    assert service is not None
    secret = combined_secret(answer.secret, joining.own_part)
    if len(answer.nodes) > 1:
        service.start(secret)
    else:
        service.stop()  # no other node asks
    own = answer.node_of_rank[rendezvous.rank]
    if answer.node_of_rank.index(own) == rendezvous.rank:  # the lowest rank of its node
        names = tuple(node.name for node in answer.nodes)
        try:
            write_node_mark(root, NodeMark(nodes=names, own=own, replicas=replicas))
        except StorageError as error:  # the mark is for people and commands
            _log.warning("%s: the mark of this node could not be written: %s", root.location, error)
    folders: list[Storage] = []
    for number, node in enumerate(answer.nodes):
        if number == own:
            folders.append(root)
        else:
            peer = Peer(node.addresses, node.port, node.service, secret, node.label, patience)
            folders.append(PeerStorage(peer, node.location))
    if rendezvous.rank == 0:
        _log.info("%s: the ranks are on %d nodes", answer.location, len(folders))
        if replicas and len(folders) == 1:
            _log.warning(
                "%s: replicas=1 keeps no copies, because all ranks see one folder: there is no other node",
                answer.location,
            )
    return NodeGroup(
        own,
        folders,
        answer.node_of_rank,
        answer.location,
        answer.arbiter,
        replicas,
        service,
        rendezvous.new_rendezvous(f"nodes/{answer.name}"),
        tuple(node.file_system for node in answer.nodes),
    )


class _NodeJoining:
    """The part of this rank in `join_nodes` before the meeting. The arguments are those of `join_nodes`."""

    def __init__(self, root: LocalStorage, replicas: int, patience: Callable[[], float]) -> None:
        self._root, self._replicas, self._patience = root, replicas, patience
        self.service: FileService | None = None
        """The file service of this rank, once it reported."""
        self.own_part = b""
        """The secret of the environment, once this rank reported; empty without one."""

    def report(self) -> _Report:
        """Opens the file service, and describes the folder and how to reach it."""
        root = self._root
        self.own_part, address = own_secret(), chosen_address()
        try:
            root.make_folder()
            found, file_system = os.stat(root.path), file_system_number(root.path)
            self.service = service = FileService(root, self._patience, address)
        except (OSError, StorageError) as error:
            raise StorageError(
                f"{root.location}: this rank cannot use the folder of its node: {error}", file=root.location
            ) from error
        return _Report(
            (_running_system(), found.st_dev, found.st_ino),
            root.location,
            file_system,
            self._replicas,
            socket.gethostname(),
            _addresses() if address is None else (address,),
            service.port,
            service.name,
            bool(self.own_part),
        )


def _decide(reports: Sequence[_Report]) -> list[_NodeAnswer]:
    """Rank 0: numbers the nodes, and assigns each rank one peer on each other node."""
    other = next((rank for rank, one in enumerate(reports) if one.replicas != reports[0].replicas), None)
    if other is not None:
        raise StructureError(
            f"rank 0 passes replicas={reports[0].replicas}, and rank {other} replicas="
            f"{reports[other].replicas}: pass the same on all ranks",
            ranks=[0, other],
        )
    other = next((rank for rank, one in enumerate(reports) if one.has_secret != reports[0].has_secret), None)
    if other is not None:
        with_secret, without = (0, other) if reports[0].has_secret else (other, 0)
        raise StructureError(
            f"rank {with_secret} has a secret in {_SECRET} or {_SECRET_FILE}, and rank {without} none: give "
            "the same secret to all ranks",
            ranks=[0, other],
        )
    numbers: dict[tuple[str, int, int], int] = {}
    node_of_rank = tuple(numbers.setdefault(report.place, len(numbers)) for report in reports)
    ranks: list[list[int]] = [[] for _ in numbers]
    for rank, node in enumerate(node_of_rank):
        ranks[node].append(rank)
    name, secret, places = secrets.token_hex(8), secrets.token_bytes(32), list(numbers)
    arbiter = places.index(min(places))

    def known_to(rank: int) -> _NodeAnswer:
        at = ranks[node_of_rank[rank]].index(rank)
        nodes = []
        for number, members in enumerate(ranks):
            report = reports[members[at % len(members)]]
            label = f"node {number} ({report.host}, rank {format_rank_ranges(members)})"
            where = f"{report.host}:{report.location}"
            reach = (report.addresses, report.port, report.service)
            nodes.append(_Node(label, where, report.location, report.file_system, *reach))
        return _NodeAnswer(name, secret, reports[0].location, tuple(nodes), node_of_rank, arbiter)

    return [known_to(rank) for rank in range(len(reports))]


def _running_system() -> str:
    """A text that is equal for all processes of one running system, also in containers."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()  # not Linux


def _addresses() -> tuple[str, ...]:
    """Addresses at which other nodes may reach this one, first that of the route to the launcher's store."""
    found = []
    store = os.environ.get("MASTER_ADDR", "")
    if store:
        try:
            for family, kind, _, _, address in socket.getaddrinfo(store, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(address)  # chooses a route, and sends nothing
                    found.append(str(probe.getsockname()[0]))
        except OSError:
            pass  # the name of the node must suffice
    found.append(socket.gethostname())
    loopback = [one for one in found if one.startswith("127.") or one == "::1"]
    return tuple(dict.fromkeys([*(one for one in found if one not in loopback), *loopback]))


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the user, from SHARDPROOF_NODES_SECRET_FILE or SHARDPROOF_NODES_SECRET; empty for none.

    Raises:
        StorageError: the file cannot be read, or the secret has fewer than 16 or more than 4096 bytes, or
            both variables are set.

    >>> own_secret({}), own_secret({"SHARDPROOF_NODES_SECRET": "correct horse battery"})
    (b'', b'correct horse battery')
    """
    path, text = environment.get(_SECRET_FILE), environment.get(_SECRET)
    if path and text:
        raise StorageError(f"{_SECRET_FILE} and {_SECRET} are both set: unset one of them")
    if not path and not text:
        return b""
    name = f"{_SECRET_FILE} ({path})" if path else _SECRET
    try:
        if path:
            with open(path, "rb") as file:
                secret = file.read(_MOST_SECRET + 1).strip()
        else:
            secret = (text or "").encode("utf-8", "surrogateescape").strip()
    except OSError as error:
        raise StorageError(f"{name}: the secret of the run cannot be read: {error}", file=path) from error
    if not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        raise StorageError(
            f"{name}: the secret of the run has {len(secret)} bytes, expected {_LEAST_SECRET} to "
            f"{_MOST_SECRET}. Make one with: openssl rand -hex 32"
        )
    return secret


def combined_secret(of_store: bytes, own: bytes) -> bytes:
    """The secret of a run; see note "The secret of a run".

    >>> combined_secret(b"drawn", b""), len(combined_secret(b"drawn", b"of the user"))
    (b'drawn', 32)
    """
    return hmac.digest(own, of_store, hashlib.sha256) if own else of_store


def chosen_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """The address of SHARDPROOF_NODES_INTERFACE, an interface or a numeric address; None if it is not set.

    Raises:
        StorageError: there is no such interface, it has no IPv4 address, or the address is unspecified.

    >>> chosen_address({}), chosen_address({"SHARDPROOF_NODES_INTERFACE": "::1"})
    (None, '::1')
    """
    name = environment.get(_INTERFACE)
    if not name:
        return None
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        pass  # the name of an interface
    else:
        if address.is_unspecified:
            raise StorageError(
                f"{_INTERFACE}={name} is no address that other nodes can connect to. Unset it to listen on "
                "all interfaces, or name one of them"
            )
        return str(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", os.fsencode(name)[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError as error:
        known = ", ".join(label for _, label in socket.if_nameindex())
        raise StorageError(
            f"{_INTERFACE}={name}: this node has no such interface with an IPv4 address ({error}). It has "
            f"{known}. Name one of them, or give an address"
        ) from error
