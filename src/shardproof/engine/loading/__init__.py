"""Reading checkpoints: into a live state, or by slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardproof.engine.foreign import foreign_of
from shardproof.engine.loading.checkpoint import Checkpoint, NativeCheckpoint, StoredTensor
from shardproof.engine.loading.load_protocol import LoadReport, load_from
from shardproof.engine.loading.matching import LoadOptions
from shardproof.engine.loading.opening import ForeignCheckpoint, open_storage
from shardproof.engine.loading.opening import open_checkpoint as open  # noqa: A004 the public name is sp.open
from shardproof.engine.loading.read_once.agreement import UNREADABLE
from shardproof.engine.planning import Cast, Patterns
from shardproof.engine.rendezvous import Rendezvous, connected, from_rank
from shardproof.engine.storage import Location, check_location
from shardproof.reentrance import refuse_inside

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "UNREADABLE",
    "Cast",
    "Checkpoint",
    "ForeignCheckpoint",
    "LoadOptions",
    "LoadReport",
    "NativeCheckpoint",
    "Patterns",
    "StoredTensor",
    "from_rank",
    "load",
    "load_from",
    "open",
    "open_storage",
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
    read_once: bool = False,
    group: ProcessGroup | None = None,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
    format: str | None = None,  # noqa: A002 the word that users know
    trust_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fills a state tree from a committed checkpoint of any layout. All ranks call it.

    The load fills tensors in place and replaces other leaves in their container. A tuple is rebuilt in its
    parent. Objects get their state through ``load_state_dict``. The load hooks of modules and optimizers run
    at the end (docs/concepts.md). If the target has not created its optimizer
    state yet, the load creates it without a step. Every byte is verified.

    By default each rank reads the blocks that it needs, and no collective runs. A digest covers a whole block
    (256 KiB of a chunk). So each rank that needs a part of a block reads all of it, for example if rows
    become columns.

    With `read_once` one rank reads and verifies a chunk that several ranks need. It sends the others their
    parts over the process group, in rounds of bounded memory. This is faster if the storage is slower than
    the group, for example if many nodes load replicas from one file system. If all ranks are on one
    node, they exchange parts through shared memory instead. This is faster if they need different parts of
    the same chunks.

    Args:
        path: the folder of the checkpoint, or a checkpoint of another project: its folder or file. Or a URL,
            such as ``s3://bucket/run/step``.
        state: the tree to fill.
        strict: True if a key that only the target or only the checkpoint has is an error. False: an error
            only if the checkpoint has no key of the target. A different shape or dtype is always an error.
            An object with ``state_tree`` is optional on both sides.
        include: patterns (`fnmatch`, over the whole key or the keys above it) of the keys to load; None for
            all.
        exclude: patterns of the keys that the load leaves unchanged. The log names a pattern that matches no
            key.
        cast: True, or patterns of keys, where values may be converted to the dtype of their destination. A
            warning names keys whose integers cannot hold every stored number.
        rename: maps a key of the target to a key of the checkpoint. It applies to that key and all keys below
            it. If several keys of the checkpoint match, the longest decides. An empty key of the target
            removes the prefix. The checkpoint's own keys of such a name, and those below it, are not loaded:
            ``{"model": "ema.module"}`` loads averaged weights into the model. `convert` maps in the other
            direction.
        read_once: True if one rank reads each chunk that several ranks need, and sends it to them. That is
            faster if the ranks need the same bytes from a bucket or a network file system, and on any storage
            if the layout is cut along other dimensions than the saved one (rows to columns). Otherwise it is
            slower on a local disk. The same on all ranks. During the exchange, the timeout of the group
            bounds the wait for a silent rank.
        group: the process group for `read_once`. Its ranks are exactly the ranks that load. None: the default
            group.
        rendezvous: the rendezvous of all ranks. None: the one that `shardproof.rendezvous.connect` finds.
        deadline: seconds that a rank may be silent before all ranks fail with `RankSilent`. It bounds each
            wait for another rank, and the time to reach the store. It does not bound the whole call: the
            ranks wait for a rank that reports progress. None: the deadline of the rendezvous (default
            300 s). Cannot be combined with `rendezvous`, which has its own deadline.
        format: name of the format; None to find it. docs/formats.md lists the names.
        trust_pickle: True to unpickle values of other formats that are not plain data. That may run code of
            the checkpoint. Tensors never need it.
        storage_options: settings of an object store; see `shardproof.storage.ObjectStorage`. None: those of
            the environment.

    Returns:
        The report of this rank: bytes read, and keys that were missing or left over.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `deadline` is not positive, or is given together with `rendezvous`.
        NotCommittedError: `path` has no committed checkpoint.
        StructureError: a pattern of `include` or `cast`, or a stored key of `rename`, matches no key; or
            `include` is empty.
        KeyMismatchError: the state and the checkpoint do not fit; nothing was changed, unless the load hooks
            of a module left keys (the message says so).
        CorruptChunkError, FormatError, StorageError, TilingError: the checkpoint is damaged. The message says
            so if tensors were partly overwritten before the load failed.
        RankFailure, RankSilent: a rank failed or fell silent.

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
    check_location("path", path)
    source = foreign_of(path, storage_options)
    with connected(rendezvous, deadline) as meetings, meetings.operation(f"load {source.location}"):
        # Here, so that a wrong option of one rank fails the load on all ranks.
        options = LoadOptions(strict, include, exclude, cast, rename, read_once, group, format, trust_pickle)
        return load_from(source, state, meetings, options)
