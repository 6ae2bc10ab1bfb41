"""Reading checkpoints: into a live state, or by slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardproof.interop import foreign_of
from shardproof.loading.checkpoint import Checkpoint, NativeCheckpoint, StoredTensor
from shardproof.loading.foreign_checkpoint import ForeignCheckpoint
from shardproof.loading.load_protocol import LoadReport, load_from
from shardproof.loading.matching import Options, ReadOnce, from_rank
from shardproof.loading.opening import open_checkpoint as open  # noqa: A004 the public name is sp.open
from shardproof.loading.opening import open_storage
from shardproof.loading.read_once.agreement import UNREADABLE
from shardproof.loading.selection import Cast, Patterns, check_patterns, rename_keys, selects
from shardproof.reentrance import refuse_inside
from shardproof.rendezvous import Rendezvous, connected
from shardproof.storage import Location

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "UNREADABLE",
    "Cast",
    "Checkpoint",
    "ForeignCheckpoint",
    "LoadReport",
    "NativeCheckpoint",
    "Options",
    "Patterns",
    "ReadOnce",
    "StoredTensor",
    "check_patterns",
    "from_rank",
    "load",
    "load_from",
    "open",
    "open_storage",
    "rename_keys",
    "selects",
]


def load(
    path: Location,
    state: Any,
    *,
    strict: bool = True,
    include: Patterns = None,
    exclude: Patterns = None,
    cast: Cast = False,
    rename: Mapping[str, str] | None = None,
    read_once: ReadOnce = False,
    group: ProcessGroup | None = None,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
    format: str | None = None,  # noqa: A002 the word that users know
    trust_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fills a state tree from a committed checkpoint, saved from whatever layout. Called by every rank.

    Tensors are filled in place, other leaves are replaced in their container (a tuple on the way is rebuilt
    in its parent), objects get their state through ``load_state_dict``. Optimizer state that the target has
    not created yet is created, without running a step. Every byte is verified.

    Every rank reads what it wants by itself, and no collective runs. A block (256 KiB of a chunk) that
    several ranks want parts of, as when rows become columns, is then read by each of them, and whole, since
    its digest speaks of all its bytes. With `read_once` one of them reads and verifies it, and hands the
    others their parts over the process group, in rounds of bounded memory. That pays where storage is slower
    than the group, as when many nodes load replicas from one file system. Ranks of one node share memory
    instead, which pays where most of a chunk is for others, as when rows become columns.

    Args:
        path: the folder of the checkpoint, or a checkpoint of another project: its folder or file. Or a URL,
            such as ``s3://bucket/run/step``.
        state: the tree to fill.
        strict: True if a key that only one side has is an error. Another shape or dtype always is one. An
            object with ``state_tree`` may be on one side alone.
        include: patterns (`fnmatch`, over the whole key or the keys above it) of the keys to load; None for
            all.
        exclude: patterns of the keys to leave as they are.
        cast: True, or patterns of keys, where values may be converted to the dtype of their destination.
        rename: key in the target to key in the checkpoint, for a key and all below it. The longest key of the
            checkpoint decides. An empty key in the target removes the prefix. `convert` maps the other way.
        read_once: True to hand on what several ranks want; "auto" to do so where it takes less time, by what
            storage and group are measured to give (a few milliseconds, and only if much is wanted twice). The
            same on all ranks. A rank that falls silent meanwhile is given up after the group's own timeout.
        group: the process group to hand on over, of just the ranks that load; None for the default group.
        rendezvous: where the ranks meet; found by itself when None.
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`, in this call. It
            bounds each wait for another rank, and the time to reach the store. It does not bound the call as
            a whole: a rank that reports progress is waited for. None: the deadline of the rendezvous (300 s
            unless set). Not together with `rendezvous`, which has its own.
        format: name of the format; None to find it. docs/formats.md lists the names.
        trust_pickle: True to unpickle values of other formats that are no plain data. That may run code of
            the checkpoint. Tensors never need it.
        storage_options: settings of an object store; see `shardproof.storage.ObjectStorage`. None: those of
            the environment.

    Returns:
        What was read, and which keys were missing or left over.

    Raises:
        ValueError: `deadline` is not positive, or `rendezvous` is given, too.
        NotCommittedError: no checkpoint is here.
        KeyMismatchError: the state and the checkpoint do not fit; nothing was changed.
        CorruptChunkError, FormatError, StorageError, TilingError: the checkpoint is damaged. If tensors were
            partly overwritten by then, the message says so.
        RankFailure, RankSilent: some rank failed or fell silent.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> place = tempfile.mkdtemp() + "/ckpt"
        >>> _ = sp.save(place, {"w": torch.ones(2), "epoch": 3})
        >>> state = {"w": torch.zeros(2), "epoch": 0}
        >>> report = sp.load(place, state, deadline=60.0)
        >>> state
        {'w': tensor([1., 1.]), 'epoch': 3}
    """
    refuse_inside("load")
    options = Options(strict, include, exclude, cast, rename, read_once, group, format, trust_pickle)
    source = foreign_of(path, storage_options)
    with connected(rendezvous, deadline) as meetings, meetings.operation(f"load {source.location}"):
        return load_from(source, state, meetings, options)
