"""Saves to folders that a framework names, in the background, and removes folders once that is safe.

Trainers name the folder of each checkpoint, and remove older folders as soon as a save has returned. At that
time, a save in the background is not committed. `FolderSaves` therefore removes a folder after the commit of
the newest save. If that save fails, it removes nothing until a later save commits.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

import shardproof as sp
from shardproof.engine.format import MANIFEST_NAME, read_manifest
from shardproof.engine.loading import LoadOptions, load_from
from shardproof.engine.rendezvous import Rendezvous, check_group, connect
from shardproof.engine.saving import Saver, SaveRequest
from shardproof.engine.storage import LocalStorage
from shardproof.frameworks.shared.rank_work import on_rank_0

_log = logging.getLogger("shardproof")

_SAVES = "shardproof_saves"
"""The attribute of a framework's object that has its `FolderSaves`."""
_TENSOR = "torch.Tensor"
"""The only key of a dict that stands for a small tensor. Its value is the tensor as an array."""
_SMALL = 64
"""Elements of a tensor that is saved within a value, at most."""
_ARRAY_DTYPES = {torch.float64, torch.float32, torch.int64, torch.int32, torch.bool}
"""Dtypes of a tensor that is saved within a value. numpy has them, and scores and counters use them."""


class Value:
    """Plain data and tensors in dicts, lists and tuples. A load replaces it, whatever its old structure is.

    Small tensors are saved within the value and not under keys of their own. So their number may change
    without a change of the structure of the state, and the next save reuses the plan. The scores of the best
    checkpoints are an example.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """The value, with small tensors as arrays."""
        return _mapped(self.value, _packed)

    def load_state_dict(self, value: Any) -> None:
        """Replaces the value."""
        self.value = _mapped(value, _unpacked)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    changed = change(value)
    if changed is not value:
        return changed
    kind = type(value)
    if kind is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_mapped(item, change) for item in value)
    return value


def _packed(value: Any) -> Any:
    is_small = type(value) is torch.Tensor and value.numel() <= _SMALL and value.dtype in _ARRAY_DTYPES
    return {_TENSOR: value.detach().cpu().numpy().copy()} if is_small else value


def _unpacked(value: Any) -> Any:
    is_packed = type(value) is dict and value.keys() == {_TENSOR}
    return torch.from_numpy(np.array(value[_TENSOR])) if is_packed else value


class FolderSaves:
    """Saves and loads checkpoints in folders. All ranks call `save`, `load` and `wait` together.

    Args:
        background: False to return from `save` after the commit.
    """

    def __init__(self, *, background: bool = True) -> None:
        self._background = background
        self._connection: tuple[Rendezvous, Saver] | None = None
        self._lock = threading.Lock()
        self._uncommitted = False
        """True from the start of a save to its commit. It stays True after a failed save."""
        self._waiting: list[Callable[[], None]] = []
        """Functions to call after the commit."""

    def save(
        self,
        folder: str | os.PathLike[str],
        state: Any,
        *,
        step: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Saves a state tree, and returns when training may continue.

        Args:
            folder: the folder of the checkpoint. A committed checkpoint in it is replaced.
            state: see `shardproof.save`.
            step: stored in the manifest.
            then: called on this rank after the commit, such as a rotation. Not called if the save fails.

        Raises:
            ValueError: `folder` is a URL.
            ShardproofError: see `shardproof.save`; or the failure of the previous save.
        """
        storage, after = LocalStorage(local_path(folder)), partial(self._committed, then)
        _, saver = self._connected()
        saver.wait_for_end()  # the previous save has called `_committed`, or failed
        with self._lock:
            self._uncommitted = True
        saver.begin(storage, state, SaveRequest(step, overwrite=True), after=after)
        if not self._background:
            saver.wait()

    def load(self, folder: str | os.PathLike[str], state: Any, **options: Any) -> sp.LoadReport:
        """Fills a state tree from a committed folder, after the end of the current save.

        See `shardproof.load` for the state and the options.

        Raises:
            ValueError: `folder` is a URL.
            ShardproofError: see `shardproof.load`.
        """
        source = LocalStorage(local_path(folder))
        rendezvous, saver = self._connected()
        saver.wait_for_end()
        with rendezvous.operation(f"load {source.location}"):
            return load_from(source, state, rendezvous, LoadOptions(**options, format="shardproof"))

    def choose(self, run: str | os.PathLike[str], find: Callable[[], str | None]) -> str | None:
        """The checkpoint that rank 0 finds. All ranks call it, after the end of the current save.

        File systems may show a new folder to some ranks earlier than to others.

        Raises:
            RankFailure: `find` failed. Raised on every rank.
        """
        return os.fsdecode(self._of_rank_0(run, "choose", lambda: os.fsencode(find() or ""))) or None

    def agree(self, checkpoint: str | os.PathLike[str], ask: Callable[[], bool]) -> bool:
        """The answer of rank 0 about a checkpoint, such as its format. All ranks call it.

        Raises:
            RankFailure: `ask` failed. Raised on every rank.
        """
        return self._of_rank_0(checkpoint, "format", lambda: b"true" if ask() else b"") == b"true"

    def wait(self) -> None:
        """Waits for the current save.

        Raises:
            ShardproofError: the save failed, and no call has raised the failure yet.
        """
        if self._connection is not None:
            self._connection[1].wait()

    def wait_for_end(self) -> None:
        """Waits for the current save and its removals; the next `save` or `wait` reports its error."""
        if self._connection is not None:
            self._connection[1].wait_for_end()

    def remove(self, folder: str | os.PathLike[str]) -> None:
        """Removes a checkpoint once the current save is committed. See `remove_folder`. One rank calls it."""
        path = os.path.abspath(folder)
        self.after_commit(lambda: remove_folder(path))

    def after_commit(self, act: Callable[[], None]) -> None:
        """Calls a function once the newest save is committed: now, or in the thread of saves.

        If the save fails, it calls the function after the next save that is committed.
        """
        with self._lock:
            if self._uncommitted:
                self._waiting.append(act)
                return
        act()

    def _connected(self) -> tuple[Rendezvous, Saver]:
        if self._connection is None:
            rendezvous = connect()
            self._connection = rendezvous, Saver(rendezvous)
        check_group(self._connection[0])
        return self._connection

    def _of_rank_0(self, place: str | os.PathLike[str], phase: str, work: Callable[[], bytes]) -> bytes:
        rendezvous, saver = self._connected()
        saver.wait_for_end()
        operation = f"load {os.path.abspath(place)}"
        with rendezvous.operation(operation):
            return on_rank_0(rendezvous, operation, phase, work)

    def _committed(
        self, then: Callable[[], None] | None, _result: sp.SaveResult, _progress: Callable[[int, int], None]
    ) -> None:
        """Calls the waiting functions, in the thread of saves, after the commit.

        It calls every function, even if an earlier one fails.
        """
        with self._lock:
            self._uncommitted = False
            acts, self._waiting = self._waiting, []
        with ExitStack() as calls:  # it calls its functions in reverse order
            for act in (then, *reversed(acts)):
                if act is not None:
                    calls.callback(act)


def saves_of(owner: Any) -> FolderSaves:
    """The `FolderSaves` of an object of a framework, made at the first call and stored in the object."""
    saves: FolderSaves = vars(owner).setdefault(_SAVES, FolderSaves())
    return saves


def numbered_folders(folder: str | os.PathLike[str], name: re.Pattern[str]) -> list[tuple[int, str]]:
    """The numbers and paths in a folder whose whole names match, in the order of the numbers.

    The first group of the pattern `name` is the number. A folder that does not exist has none.

    Example:
        >>> numbered_folders("/nowhere", re.compile(r"step-([0-9]+)"))
        []
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = filter(None, map(name.fullmatch, names))
    return sorted((int(match[1]), os.path.join(folder, match[0])) for match in matches)


def folders_to_remove(
    folders: Sequence[str], whole: Sequence[str], limit: int, spared: Collection[str] = ()
) -> list[str]:
    """The folders without a whole checkpoint, and the oldest of the others, so that `limit` of these remain.

    Args:
        folders: the folders of checkpoints, oldest first.
        whole: those of them that have a whole checkpoint, oldest first.
        limit: number of whole checkpoints that remain.
        spared: whole checkpoints that remain in any case. They count.

    Example:
        >>> folders_to_remove(["1", "2", "3", "4"], ["1", "3", "4"], 2)
        ['2', '1']
    """
    removable = [folder for folder in whole if folder not in spared]
    excess = max(len(whole) - limit, 0)
    return [folder for folder in folders if folder not in whole] + removable[:excess]


def local_path(folder: str | os.PathLike[str]) -> str:
    """The absolute path of a checkpoint that a framework names.

    Example:
        >>> local_path("s3://bucket/run")
        Traceback (most recent call last):
        ValueError: s3://bucket/run is a URL, and this adapter saves to folders: give the path of a folder
    """
    if "://" in os.fspath(folder):
        raise ValueError(f"{folder} is a URL, and this adapter saves to folders: give the path of a folder")
    return os.path.abspath(folder)


def is_committed(folder: str | os.PathLike[str]) -> bool:
    """True if a folder has a committed checkpoint of shardproof.

    Example:
        >>> is_committed("/nowhere")
        False
    """
    return os.path.isfile(os.path.join(folder, MANIFEST_NAME))


def newest_committed(folders: Iterable[str]) -> str | None:
    """The folder with the highest step; among equal steps, the last one saved. None if none is committed.

    The manifests give step and time, so a copy of a checkpoint has the same step and time.

    Raises:
        FormatError: a manifest is damaged.
    """
    ages = {}
    for folder in filter(is_committed, folders):
        manifest = read_manifest(LocalStorage(os.path.abspath(folder)))
        ages[folder] = (-1 if manifest.step is None else manifest.step, manifest.time, folder)
    return max(ages, key=lambda folder: ages[folder], default=None)


def remove_folder(path: str) -> None:
    """Removes a folder or a file at once, if it exists; of a link only the link. Logs if that fails."""
    if not os.path.lexists(path):
        return
    try:
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
            return
        if is_committed(path):
            os.unlink(os.path.join(path, MANIFEST_NAME))  # first, so that no reader sees half a checkpoint
        shutil.rmtree(path)
    except OSError as error:
        _log.warning("%s: an older checkpoint cannot be removed: %s", path, error)
