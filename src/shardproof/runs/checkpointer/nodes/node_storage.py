"""The folders of all nodes as one `Storage`.

Note "What is where": a rank writes its files to the folder of its own node. With `replicas`, the partner node
has a copy of the same name. Every node has each manifest, pin and verdict. A rank reads a file
from its own node, or else from a node that has it.

Note "The commit": `publish` writes a file on one node first, the arbiter, which is the same for all ranks.
This write is exclusive, so only one of two jobs on the same nodes commits. Then `publish` writes the file on
all other nodes. A step is committed once one node has its manifest. If the nodes have different manifests of
a step, the later save counts (note "Copies" in `tiered_run`). A crash during `publish` leaves nodes with
an older manifest, or without one. The step is still whole, because the shard files are durable before the
first write. A restore of the step publishes the manifest on all nodes, so that the step does not depend on
one of them.

Note "Removal": `delete` removes a file on all nodes. Retention removes the manifest of a step on all nodes
before the first shard file. A node that was absent still has the old step, which the next retention removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from shardproof.engine.format import (
    MANIFEST_NAME,
    SEAL_LENGTH,
    FileRecord,
    Manifest,
    parse_shard_name,
    read_manifest_text,
    read_seal,
)
from shardproof.engine.storage import (
    FreeSpace,
    LocalStorage,
    Sink,
    Storage,
    choose_cache,
)
from shardproof.errors import AlreadyCommittedError, ShardproofError, StorageError
from shardproof.runs.checkpointer.nodes.node_group import NodeGroup
from shardproof.runs.checkpointer.nodes.peer_frames import PeerRequest, name_from, name_to
from shardproof.runs.checkpointer.nodes.peer_storage import PeerSink, PeerStorage, ask_all
from shardproof.runs.checkpointer.step_folders import PINNED_NAME, read_mark
from shardproof.runs.checkpointer.tiers import NearerCopy, TieredRun


class NodesView(TieredRun):
    """The folders of all nodes, and a second tier behind them, as one `Storage` that can only be read."""

    def __init__(self, group: NodeGroup, second: Storage | None) -> None:
        super().__init__([*group.folders, *([] if second is None else [second])])
        self.group = group
        self._second = second

    @property
    def location(self) -> str:
        """The run on the node of rank 0, or on the second tier if no node has the manifest."""
        if self._path and self._second is not None and self._is_second(tier := self._holder()):
            return self._places[tier].location
        return f"{self.group.location}/{self._path}" if self._path else self.group.location

    @property
    def folder(self) -> str:
        """Name of the folder."""
        return self.own.folder

    @property
    def tier(self) -> Storage:
        """The nodes, or the second tier if no node has the manifest."""
        holder = self._holder()
        return self._runs[holder] if self._is_second(holder) else NodeStorage(self.group)

    def seen_here(self) -> Storage:
        """The folder of this node, and the second tier."""
        own = self.group.folders[self.group.own]
        return own if self._second is None else TieredRun([own, self._second])

    def _other_saves(self, folder: str) -> Iterator[NearerCopy]:
        """The nodes without the save of a step that is in use."""
        view = self.within(folder)
        seal = read_seal(view._places[view._holder()])
        left_out = self.choice.left_out.get(f"{folder}/{MANIFEST_NAME}", ())
        sizes = view._ask("size", lambda place: place.size(MANIFEST_NAME), MANIFEST_NAME)
        for node in range(len(self.group.folders)):
            if node in left_out:
                continue
            if sizes[node] is None:
                reason = "the folder of this node has no manifest of this step: it is new, or was emptied"
            elif read_seal(view._places[node]) != seal:
                reason = "the folder of this node is stale: it has another, earlier save of this step"
            else:
                continue
            yield NearerCopy(folder, self._runs[node].location, reason, damaged=False)

    @property
    def own(self) -> LocalStorage:
        """The folder on this node."""
        own = self._places[self.group.own]
        assert isinstance(own, LocalStorage)
        return own

    def _is_second(self, tier: int) -> bool:
        return tier == len(self.group.folders)

    def _is_farther(self, tier: int, near: int) -> bool:
        return self._is_second(tier) and not self._is_second(near)

    def _is_damage(self, copies: Sequence[int]) -> bool:
        return all(map(self._is_second, copies))

    def _numbers(self, name: str, rank: int | None) -> Sequence[int]:
        """The own node, then the node of the rank that wrote a shard file, if ranks have not moved."""
        group = self.group
        own = group.own if rank is None else group.node_of_rank[rank]
        first: list[int | None] = [own]
        written = parse_shard_name(name)
        if written is not None and written[0] < len(group.node_of_rank):
            writer = group.node_of_rank[written[0]]
            first += [writer, group.partner_of(writer)]
        nearest = [number for number in first if number is not None]
        return tuple(dict.fromkeys([*nearest, *range(len(self._places))]))

    def _has(self, tier: int, name: str) -> bool:
        return self._places[tier].size(name) is not None

    def _ask(self, do: str, work: Callable[[Storage], object], name: str = "") -> dict[int, object]:
        """As `TieredRun._ask`. All other nodes are asked at once."""
        peers = {
            number: place.peer for number, place in enumerate(self._places) if isinstance(place, PeerStorage)
        }
        here = range(len(self._places))
        found = {number: work(self._places[number]) for number in here if number not in peers}
        answers = ask_all(list(peers.values()), PeerRequest(do, name_to(self._path), name_to(name)))
        for number, answer in zip(peers, answers, strict=True):
            found[number] = [name_from(one) for one in answer] if isinstance(answer, list) else answer
        return found


class NodeStorage(NodesView):
    """The folders of all nodes as one `Storage`; see the notes of this module.

    Example:
        >>> import tempfile
        >>> from shardproof.runs.checkpointer.nodes import join_nodes
        >>> from shardproof.rendezvous import LocalRendezvous
        >>> storage = NodeStorage(join_nodes(LocalRendezvous(), LocalStorage(tempfile.mkdtemp()), 0))
        >>> storage.publish("step-00000001/manifest.json", b"{}")
        >>> storage.folders()
        ['step-00000001']
    """

    _manifest_is_final = False

    def __init__(self, group: NodeGroup) -> None:
        super().__init__(group, None)

    def create(self, name: str) -> Sink:
        """Begin a new file on this node, and with `replicas` on its partner.

        Only saves beside training create files here, so the page cache is chosen for them.
        """
        is_through = choose_cache(0, direct=self.own.direct, beside_training=True).through
        own = (self.own if is_through else self.own.past_cache()).create(name)
        partner = self.group.partner_of(self.group.own)
        if partner is None:
            return own
        place = self._places[partner]
        assert isinstance(place, PeerStorage)
        try:
            return NodeSink(own, place.create(name))
        except BaseException:
            own.abort()
            raise

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name` on all nodes (note "The commit")."""
        arbiter = self.group.arbiter
        if not replace and self.size(name) is not None:
            raise AlreadyCommittedError(
                f"{self.location}/{name} exists on a node. It was not touched: choose another place or step, "
                "or ask for overwriting.",
                path=f"{self.location}/{name}",
                file=name,
            )
        self._places[arbiter].publish(name, data, replace=replace)
        try:
            if arbiter != self.group.own:
                self.own.publish(name, data, replace=True)
            others = [
                place.peer
                for number, place in enumerate(self._places)
                if number != arbiter and isinstance(place, PeerStorage)
            ]
            request = PeerRequest(
                "publish", name_to(self._path), name_to(name), replace=True, count=len(data)
            )
            ask_all(others, request, data)
        except ShardproofError as error:
            raise StorageError(
                f"{self.location}/{name} is in place on {self._places[arbiter].location}, and not on all "
                f"nodes: {error.message}",
                **{**error.details, "in_place": True},
            ) from error

    def flush(self, name: str) -> None:
        """Make the nearest copy of a file durable."""
        self._places[self._tier_of(name)].flush(name)

    def flush_names(self) -> None:
        """Make durable which files are in this folder on each node; see `Storage.flush_names`."""
        self._ask("flush_names", lambda place: place.flush_names())

    def delete(self, name: str) -> None:
        """Remove a file on all nodes (note "Removal")."""
        self._ask("delete", lambda place: place.delete(name), name)

    def free_space(self) -> FreeSpace | None:
        """The space for new files on this node, and the file system of the partner that gets their copies."""
        found, partner = self.own.free_space(), self.group.partner_of(self.group.own)
        if found is None or partner is None or not self.group.file_systems:
            return found
        return dataclasses.replace(found, copies_on=self.group.file_systems[partner])

    def confirm(self, restored: NodesView) -> bytes | None:
        """Gives the manifest and the pin of a restored step to the nodes that lack them (note "The commit").

        Returns:
            The bytes of the manifest; None if only the second tier has it.

        Raises:
            StorageError: a node failed, or another process removed the step.
        """
        if restored._is_second(restored._holder()):
            return None
        text, pin = read_manifest_text(restored), read_mark(restored, PINNED_NAME)
        for place in restored._places[: len(self.group.folders)]:
            if read_seal(place) != text[-SEAL_LENGTH:]:
                place.publish(MANIFEST_NAME, text, replace=True)
                if pin is not None:
                    place.publish(PINNED_NAME, pin, replace=True)
        return text

    def holders(self, folder: str, records: Iterable[FileRecord]) -> dict[FileRecord, set[int]]:
        """The nodes that have each file of a step. The records have their folders, even the step's own."""
        named = [msgspec.structs.replace(record, folder=record.folder or folder) for record in records]
        lists = {
            name: self.within(name)._ask("list", lambda place: place.list())
            for name in {record.folder for record in named}
        }
        files_by_node = {
            name: {node: frozenset(files) for node, files in found.items() if isinstance(files, list)}
            for name, found in lists.items()
        }
        return {
            record: {node for node, files in files_by_node[record.folder].items() if record.name in files}
            for record in named
        }

    def has_copies(self, folder: str, manifest: Manifest) -> bool:
        """True if every shard file of a step has as many copies as `replicas` requires."""
        if self.group.partner_of(self.group.own) is None:
            return True
        return all(len(nodes) > 1 for nodes in self.holders(folder, manifest.files).values())


class NodeSink:
    """A new file on this node and on its partner. Both get the same bytes from memory."""

    def __init__(self, own: Sink, partner: PeerSink) -> None:
        self._own, self._partner = own, partner

    def write_at(self, start: int, buffer: memoryview) -> None:
        """Write the bytes of `buffer` at byte `start` of both files."""
        self._own.write_at(start, buffer)
        self._partner.write_at(start, buffer)

    def finish(self, size: int) -> None:
        """Give both files `size` bytes, and flush both at the same time."""
        self._partner.begin_finish(size)
        try:
            self._own.finish(size)
        finally:
            self._partner.end_finish()

    def abort(self) -> None:
        """Close and remove both files. Does nothing after `finish`."""
        with contextlib.suppress(ShardproofError):
            self._own.abort()
        self._partner.abort()
