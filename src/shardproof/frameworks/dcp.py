"""`torch.distributed.checkpoint` (DCP) with shardproof behind it.

Change the import, and `save`, `async_save` and `load` write and read checkpoints of shardproof:

    from shardproof.frameworks import dcp  # was: import torch.distributed.checkpoint as dcp

`load` also reads the checkpoints that DCP wrote. `ShardproofWriter` and `ShardproofReader` are for programs
that call torch's own functions. Every other name of this module is torch's own, unchanged.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import shardproof as sp
from shardproof._utils.humanize import listed
from shardproof.engine.foreign import Foreign, foreign_of
from shardproof.engine.loading import UNREADABLE, Checkpoint, open_storage
from shardproof.engine.rendezvous import LocalRendezvous, Rendezvous, connect
from shardproof.engine.saving import SaveRequest, refuse_run
from shardproof.engine.state import NamedModule, Place, refuse_collective, refuse_divided
from shardproof.engine.storage import LocalStorage
from shardproof.errors import KeyMismatchError, StructureError
from shardproof.frameworks.shared.replacements import LastSaver, raised_as
from shardproof.frameworks.torch.dcp_arguments import (
    OTHER_FILES,
    check_executor,
    check_planner,
    given_arguments,
    path_of,
    stages_in_background,
    storage_by_position,
)
from shardproof.frameworks.torch.dcp_storage import (
    ShardproofReader,
    ShardproofWriter,
    mark_as_committed,
    refuse_checkpoint_of_torch,
)
from shardproof.frameworks.torch.flat_state import FlatTree, is_stateful

__all__ = ["ShardproofReader", "ShardproofWriter", "async_save", "load", "save"]

_log = logging.getLogger("shardproof")
_THREAD = getattr(getattr(state_dict_saver, "AsyncCheckpointerType", None), "THREAD", None)
_last = LastSaver()


def __getattr__(name: str) -> Any:
    """Names that shardproof does not replace are those of `torch.distributed.checkpoint`."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("save_state_dict", "load_state_dict"):
        new = name.removesuffix("_state_dict")
        raise AttributeError(f"torch deprecates {name}, and shardproof does not replace it: use dcp.{new}")
    return getattr(torch_dcp, name)


@storage_by_position("storage_writer")
@raised_as()
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Saves a state dict and returns once it is committed. All ranks of the process group call it.

    It has the parameters of `torch.distributed.checkpoint.save`. A checkpoint at the same path is replaced,
    unless the storage writer has ``overwrite=False``. Keys are those of DCP. Ranks meet over the store of the
    process group, so no collective runs.

    Args:
        state_dict: tensors, plain values, and at the top level objects with `state_dict` and
            `load_state_dict`. Wrap values that differ between ranks in `shardproof.PerRank`.
        checkpoint_id: the folder of the checkpoint.
        storage_writer: a `ShardproofWriter`, also as the second argument by position. torch handles a call
            with ``HuggingFaceStorageWriter``. Others are refused.
        planner: None or a `DefaultSavePlanner`.
        process_group: the ranks that save. None: all ranks.
        no_dist: True to save only the state of this process. A process that no launcher started needs none.
        use_collectives: either value, because shardproof runs no collective.

    Returns:
        The `SaveResult` of the committed checkpoint. torch returns metadata, which
        `ShardproofReader.read_metadata` gives.

    Raises:
        StructureError: an argument is not supported, or the state dict cannot be stored.
        AlreadyCommittedError: the folder has a checkpoint, and the storage writer has ``overwrite=False``.
        ShardproofError: see `shardproof.save`. Every rank gets an error if one rank fails.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> result = save({"model": {"w": torch.ones(2)}, "step": 1}, checkpoint_id=path)
        >>> state = {"model": {"w": torch.zeros(2)}, "step": 0}
        >>> load(state, checkpoint_id=path)
        >>> state
        {'model': {'w': tensor([1., 1.])}, 'step': 1}
    """
    if isinstance(storage_writer, OTHER_FILES):
        given = given_arguments(
            checkpoint_id=checkpoint_id,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
        return state_dict_saver.save(state_dict, storage_writer=storage_writer, **given)
    storage = LocalStorage(path_of("save", checkpoint_id, storage_writer, ShardproofWriter))
    rendezvous = _rendezvous_of(process_group, no_dist)
    tree = _tree_to_save(rendezvous, storage, state_dict, planner)
    return _last.at(rendezvous, storage.location).save(storage, tree, **_at(storage, storage_writer))


@raised_as()
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = _THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """Saves a state dict in the background; returns once the caller may change it.

    It has the parameters of `torch.distributed.checkpoint.async_save`; those of `save` mean the same here.

    Args:
        state_dict: see `save`.
        checkpoint_id: see `save`.
        storage_writer: see `save`.
        planner: see `save`.
        process_group: see `save`.
        async_checkpointer_type: has no effect, because shardproof writes in threads that do not need the
            interpreter lock for their work. A process gives a warning.
        async_stager: None or a stager of torch. It is not used, because shardproof copies the tensors itself.
        no_dist: see `save`.
        use_collectives: see `save`.

    Returns:
        A `concurrent.futures.Future` of the `SaveResult`. If `async_stager` stages asynchronously, an
        ``AsyncSaveResponse`` with that future, as torch returns it.

    Raises:
        StructureError: an argument is not supported, or the state dict cannot be stored.
        ShardproofError: the ranks do not agree on the save, or the previous save failed and no call has read
            the result of its future.

    Example:
        >>> import tempfile, torch
        >>> future = async_save({"w": torch.ones(2)}, checkpoint_id=tempfile.mkdtemp() + "/step-1")
        >>> future.result().tensors
        1
    """
    if isinstance(storage_writer, OTHER_FILES):
        given = given_arguments(
            checkpoint_id=checkpoint_id,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
        return state_dict_saver.async_save(state_dict, storage_writer=storage_writer, **given)
    check_executor(async_checkpointer_type)
    responds = stages_in_background(async_stager)
    storage = LocalStorage(path_of("save", checkpoint_id, storage_writer, ShardproofWriter))
    rendezvous = _rendezvous_of(process_group, no_dist)
    tree = _tree_to_save(rendezvous, storage, state_dict, planner)
    pending = _last.at(rendezvous, storage.location).begin(
        storage, tree, SaveRequest(**_at(storage, storage_writer)), stage_all=True
    )
    pending.set_error_context(raised_as)
    future: Future[Any] = pending.future()
    if not responds:
        return future
    staged: Future[None] = Future()
    staged.set_result(None)
    return state_dict_saver.AsyncSaveResponse(staging_completion=staged, upload_completion=future)


@storage_by_position("storage_reader")
@raised_as()
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Fills a state dict in place from a checkpoint of shardproof, of DCP, or of another known format.

    It has the parameters and the meaning of `torch.distributed.checkpoint.load`: tensors are filled in place
    and converted to the dtype that they have, other values are replaced, and objects at the top level get
    their state by `load_state_dict`. A tensor on the meta device is replaced by one with memory. A key that
    the checkpoint lacks is an error. Other keys of the checkpoint are ignored. Every byte is verified, and no
    pickle is run.

    Args:
        state_dict: the state dict to fill.
        checkpoint_id: the folder or file of the checkpoint.
        storage_reader: a `ShardproofReader`, also as the second argument by position. torch handles a call
            with ``HuggingFaceStorageReader`` or ``BroadcastingTorchSaveReader``. Others are refused.
        planner: None or a `DefaultLoadPlanner`. With ``allow_partial_load=True``, keys that the checkpoint
            lacks stay unchanged.
        process_group: the ranks that load. None: all ranks.
        no_dist: True to load only in this process.

    Raises:
        StructureError: an argument is not supported.
        KeyMismatchError: the checkpoint lacks keys, or has other shapes.
        ShardproofError: see `shardproof.load`. Every rank gets an error if one rank fails.
    """
    if isinstance(storage_reader, OTHER_FILES):
        given = given_arguments(
            checkpoint_id=checkpoint_id, planner=planner, process_group=process_group, no_dist=no_dist
        )
        state_dict_loader.load(state_dict, storage_reader=storage_reader, **given)
        return
    path = path_of("load", checkpoint_id, storage_reader, ShardproofReader)
    rendezvous = _rendezvous_of(process_group, no_dist)
    source = foreign_of(path)
    with rendezvous.operation(f"load {source.location}"):  # every rank raises an error here, see `sp.load`
        is_partial = check_planner(planner, DefaultLoadPlanner, "load")
        parts = {  # may run collectives
            key: _state_of(key, state_dict[key], rendezvous) for key in sorted(state_dict)
        }
        flat = FlatTree(parts)
        _fit(
            flat, source, is_partial, [key for key in parts if parts[key] is not state_dict[key]], rendezvous
        )
        has_group = (
            dist.is_available() and dist.is_initialized()
        )  # tensors are made on its device, as in torch
        flat.materialise(dist.distributed_c10d._get_pg_default_device().type if has_group else "cpu")
    report = sp.load(path, flat.tree, strict=False, cast=True, rendezvous=rendezvous)
    if report.missing and not is_partial:
        raise KeyMismatchError(
            f"{source.location} was replaced during the load, and lacks {listed(report.missing)}. The state "
            "dict is partly overwritten: load again",
            missing=list(report.missing),
            unexpected=[],
            mismatched=[],
        )
    flat.place_new()
    for key in parts:
        if is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(parts[key])
        else:
            state_dict[key] = parts[key]


def _rendezvous_of(process_group: dist.ProcessGroup | None, no_dist: bool) -> Rendezvous:
    """The rendezvous of a call's ranks.

    DCP takes a process without a process group for the only rank. The ranks of a launcher would then replace
    each other's checkpoint, so that they meet, or `connect` raises an error.
    """
    return LocalRendezvous() if no_dist else connect(group=process_group)


def _at(storage: LocalStorage, writer: ShardproofWriter | None) -> dict[str, Any]:
    """Options of a save at this place.

    The coordinator writes the file ``.metadata`` before any rank returns, as torch does: another rank may use
    or remove the folder at once.
    """
    overwrite = writer is None or writer.overwrite

    def check_place() -> None:
        refuse_run(storage)
        if not overwrite:
            refuse_checkpoint_of_torch(storage)

    return {
        "overwrite": overwrite,
        "check_place": check_place,
        "on_commit": partial(mark_as_committed, storage),
    }


def _tree_to_save(
    rendezvous: Rendezvous, storage: LocalStorage, state_dict: dict[str, Any], planner: Any
) -> dict[str, Any]:
    """The state tree of a state dict. An error of one rank ends the save on all ranks."""
    with rendezvous.operation(f"save {storage.location}"):
        check_planner(planner, DefaultSavePlanner, "save")
        states = {key: _state_of(key, value, rendezvous) for key, value in state_dict.items()}
        return FlatTree(states).with_paths()


def _fit(
    flat: FlatTree, source: Foreign, is_partial: bool, stateful: list[str], rendezvous: Rendezvous
) -> None:
    """Adapts a state to the checkpoint, if the checkpoint opens."""
    try:
        checkpoint = open_storage(source, warn=False)
    except UNREADABLE:
        return  # the following load raises the same error, and reports it to all ranks
    with checkpoint:
        flat.fit(checkpoint, partial=is_partial)
        if rendezvous.rank == 0:
            _warn(flat, checkpoint, stateful)


def _state_of(key: str, value: Any, rendezvous: Rendezvous) -> Any:
    """The value of a state dict, or the state of an object there.

    Raises:
        StructureError: ranks divide the state of an optimizer, and `state_dict` lacks it. Or a module has
            declared layouts, which its `state_dict` lacks. Or its `state_dict` is a collective.
    """
    if not is_stateful(value):
        return value
    place = Place(str(key), f"state_dict[{key!r}]")
    if not isinstance(value, torch.nn.Module):  # of Megatron-Core, whose `state_dict` has all weights
        refuse_divided(value, place)
        return value.state_dict()
    module = NamedModule(value)
    refuse_collective(module, place)
    if rendezvous.world_size > 1 and module.is_declared():
        raise StructureError(
            f"{key} is a {type(value).__qualname__} for which shardproof.layouts declares the part of this "
            "rank, which its state_dict() lacks. Save and load it by shardproof.save and shardproof.load, or "
            "by a shardproof.Checkpointer",
            key=str(key),
        )
    return value.state_dict()


def _warn(flat: FlatTree, checkpoint: Checkpoint, stateful: list[str]) -> None:
    """Logs the tensors that a load converts, and the values that it leaves out of incomplete objects."""
    if converted := flat.converted(checkpoint):
        _log.warning(
            "%s: %d tensors are converted to another dtype, as DCP does: %s",
            checkpoint.location,
            len(converted),
            listed(converted),
        )
    heads = tuple(f"{key}." for key in stateful)
    left = [key for key in checkpoint if key.startswith(heads) and not flat.takes(key)]
    if left:
        _log.warning(
            "%s: %d values of objects in the state dict are left out, because the state_dict() of these "
            "objects lacks their keys: %s. An optimizer that has not stepped lacks its state: use "
            "torch.distributed.checkpoint.state_dict.get_state_dict",
            checkpoint.location,
            len(left),
            listed(left),
        )
