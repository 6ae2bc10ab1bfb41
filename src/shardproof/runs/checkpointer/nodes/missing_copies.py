"""Replaces the second copies of a restored step that were lost with a node, in the background.

    restore: rank 0 plans -> each rank gets its part with the last meeting of the restore
    background: copy (local) -> copy (meet)

Note "Who copies": a file belongs on the node of the rank that wrote it, and on the partner of that node, as
after a save. A rank of the node that lacks a file reads it from the node that has it. So the ranks of a
replaced node fill that node.

Note "Whole or not at all": a file counts as a copy as soon as its name exists. So a rank writes the copy
under another name. It renames the copy after every byte was compared with its digest and is durable. The copy
replaces a damaged file of the same name. All bytes pass through one buffer, whatever the size of the file.

Note "A step that is removed meanwhile": a removal deletes the manifest from all nodes before any file
(`node_storage`, note "Removal"). If the manifest is still there after a copy got its name, a later removal
finds the copy. Otherwise this rank removes the copy.

Note "No save waits": the ranks meet at a rendezvous of their own. A failure is logged and loses nothing. The
next restore finds the same files, and `shardproof doctor` names them.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import NoneType

import msgspec

from shardproof._utils.humanize import counted, gigabytes
from shardproof.engine import events
from shardproof.engine.format import SEAL_LENGTH, FileRecord, decode_manifest, read_seal
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.engine.saving import Progress, Workers, unfinished, wait_while_moving
from shardproof.errors import ShardproofError, StorageError
from shardproof.runs.checkpointer.nodes.node_storage import NodeStorage
from shardproof.runs.checkpointer.nodes.peer_frames import PIECE_BYTES
from shardproof.runs.maintenance import copy_shard_file, read_whole_index

_log = logging.getLogger("shardproof")


class _FileCopy(msgspec.Struct, frozen=True, array_like=True):
    """A file to copy."""

    record: FileRecord
    """The record of the file. It has the folder even if that is the step's own."""
    source: int
    """The node that has the file."""


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """The files that one rank copies to its node."""

    name: str
    """Name of the rendezvous for these copies."""
    folder: str
    """Folder of the restored step."""
    step: int | None
    seal: bytes
    """Seal of the step's manifest."""
    copies: tuple[_FileCopy, ...]


class MissingCopies:
    """Makes missing copies, on this rank."""

    def __init__(self, nodes: NodeStorage, rendezvous: Rendezvous) -> None:
        self._nodes, self._rendezvous = nodes, rendezvous
        self._process = -1
        self._workers: Workers
        self._last: Future[None] | None = None
        self._progress = Progress()

    def plan(self, folder: str, text: bytes, left_out: Mapping[str, Sequence[int]]) -> list[bytes]:
        """Rank 0: the share of each rank. Empty if no file lacks a copy.

        All nodes have the manifest `text` of the step. `left_out` has the nodes with a damaged copy of a
        file, by ``folder/file``.
        """
        group = self._nodes.group
        if group.partner_of(group.own) is None:
            return []
        manifest = decode_manifest(text, f"{self._nodes.location}/{folder}")
        name, ranks = secrets.token_hex(8), range(self._rendezvous.world_size)
        shares: list[list[_FileCopy]] = [[] for _ in ranks]
        sizes = [0 for _ in ranks]
        single = []
        holders = self._nodes.holders(folder, (manifest.index, *manifest.files))
        for record, nodes in sorted(holders.items(), key=lambda item: -item[0].size):
            whole = nodes.difference(left_out.get(record.place, ()))
            if len(whole) != 1:
                continue  # it has two copies, or only the second tier has it
            (source,) = whole
            writer = group.node_of_rank[max(record.rank, 0) % len(ranks)]  # rank 0 wrote the index
            damaged = sorted(nodes - whole)
            targets = (*damaged, writer, group.partner_of(writer), group.partner_of(source))
            target = next(node for node in targets if node != source)
            rank = min((rank for rank in ranks if group.node_of_rank[rank] == target), key=sizes.__getitem__)
            shares[rank].append(_FileCopy(record, source))
            sizes[rank] += record.size
            single.append(record)
        if not single:
            return []
        more = f" and {counted(len(single) - 1, 'more file')}" if len(single) > 1 else ""
        _log.warning(
            "%s/%s: only one node has %s%s. The ranks make a second copy in the background",
            self._nodes.location,
            folder,
            min(record.name for record in single),
            more,
        )
        return [
            msgspec.msgpack.encode(_Share(name, folder, manifest.step, text[-SEAL_LENGTH:], tuple(share)))
            for share in shares
        ]

    def begin(self, encoded: bytes) -> None:
        """Begins to copy the share of this rank. All ranks call it; returns at once."""
        share = msgspec.msgpack.decode(encoded, type=_Share)
        if self._process != os.getpid():
            self._process, self._workers = os.getpid(), Workers("shardproof-copies", 1)
        meetings = self._rendezvous.new_rendezvous(f"copies/{share.name}")
        operation = f"nodes of {self._nodes.location}, copies of {share.folder}"
        self._last = self._workers.submit(lambda: self._make(share, meetings, operation))
        unfinished.add(self._last, self._progress, 2 * meetings.deadline, operation)

    def wait(self, timeout: float | None) -> None:
        """See `Checkpointer.wait_for_copies`."""
        if self._process != os.getpid() or self._last is None:
            return
        patience = 2 * self._rendezvous.deadline
        if timeout is None and not wait_while_moving(self._last, self._progress, patience):
            raise StorageError(
                f"{self._nodes.location}: the missing copies have made no progress for {patience:.0f} s: the "
                "storage of this node hangs"
            )
        self._last.result(timeout)

    def _make(self, share: _Share, meetings: Rendezvous, operation: str) -> None:
        """Copies this rank's share, then meets the other ranks. Each rank serves its files until then."""
        meetings.start_heartbeat()
        total = sum(copy.record.size for copy in share.copies)
        rank, done = self._rendezvous.rank, 0
        made: list[int] = []
        failed: Exception | None = None
        with events.phase(
            operation, "copy", rank=rank, world_size=self._rendezvous.world_size, step=share.step
        ) as phase:

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                self._progress.advance()
                meetings.progress(done, total)
                phase.progress(done, total)

            for copy in share.copies:
                try:
                    if self._copy(share, copy, on_bytes):
                        made.append(copy.record.size)
                except Exception as error:
                    failed = failed or error
                    phase.fail(failed)

        def report() -> list[int]:
            if failed is not None:
                raise failed
            return made

        def decide(posts: Sequence[list[int]]) -> None:
            sizes = [size for post in posts for size in post]
            _log.info(
                "%s/%s: the ranks made a second copy of %s (%s)",
                self._nodes.location,
                share.folder,
                counted(len(sizes), "file"),
                gigabytes(sum(sizes)),
            )

        try:
            with self._progress.bounded():
                MeetingSequence(meetings, operation).exchange("copy", report, decide, list[int], NoneType)
        except Exception as error:
            if rank == 0 or not isinstance(error, ShardproofError):
                _log.error(
                    "%s/%s: files that only one node has could not be copied to another node, and the next "
                    "restore tries it again: %s",
                    self._nodes.location,
                    share.folder,
                    error,
                )
            raise

    def _copy(self, share: _Share, copy: _FileCopy, on_bytes: Callable[[int], None]) -> bool:
        """Copies one file to this node (note "Whole or not at all"). False if the step was removed."""
        folders, record = self._nodes.group.folders, copy.record
        own = self._nodes.own
        source, target = folders[copy.source].within(record.folder), own.within(record.folder)
        step = own.within(share.folder)
        if read_seal(step) != share.seal:
            return False
        try:
            if record.rank < 0:
                target.publish(record.name, read_whole_index(source, record), replace=True)
                on_bytes(record.size)
            else:
                copy_shard_file(
                    source, record, target.replace(record.name), on_bytes, piece_bytes=PIECE_BYTES
                )
        except ShardproofError:
            if read_seal(step) == share.seal:
                raise
        finally:
            source.close()
        if read_seal(step) == share.seal:
            return True
        own.delete(record.place)  # note "A step that is removed meanwhile"
        return False
