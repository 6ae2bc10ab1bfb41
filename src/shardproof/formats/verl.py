"""Reads checkpoints of verl's ``FSDPCheckpointManager``.

A checkpoint is a folder, such as ``global_step_10/actor``. Each rank writes a file of ``torch.save`` each for
the model, the optimizer and the extra state, such as ``model_world_size_2_rank_0.pt``. With FSDP2, parameters
and optimizer state are DTensors, which the reader merges into whole tensors.

A key is ``model``, ``optimizer`` or ``extra_state`` and the path of the value, joined by dots. A value that
is equal on all ranks has one key. A value that differs has a key for each rank that begins with the rank:
``1.extra_state.rng``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from shardproof._utils.humanize import brief
from shardproof.engine.foreign import Foreign
from shardproof.errors import NotCommittedError
from shardproof.formats.json_values import read_json, top_level_files
from shardproof.formats.torch.torch_rank_files import RankFilesReader

_FILE = re.compile(r"(model|optim|extra_state)_world_size_([1-9][0-9]{0,8})_rank_(0|[1-9][0-9]{0,8})\.pt")
_ITEMS = {"model": "model", "optim": "optimizer", "extra_state": "extra_state"}
"""Prefix of a file's name to the prefix of its keys."""
_CONFIG = "fsdp_config.json"
_STEP = re.compile(r"global_step_([0-9]{1,18})")


class VerlReader(RankFilesReader):
    """A checkpoint of verl, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"weight": torch.zeros(3, 2)}, f"{folder}/model_world_size_1_rank_0.pt")
        >>> reader = VerlReader(Foreign(LocalStorage(folder)))
        >>> reader.world_size, list(reader.tensors)
        (1, ['model.weight'])
    """

    name = "verl"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        files: dict[int, dict[str, dict[int, str]]] = {}
        """By number of ranks, prefix of the name and rank, the name of a file."""
        for name in top_level_files(foreign, ".pt"):
            if found := _FILE.fullmatch(name):
                files.setdefault(int(found[2]), {}).setdefault(found[1], {})[int(found[3])] = name
        self.world_size = self._ranks(foreign, files)
        items = files.get(self.world_size, {})
        for prefix in sorted(items, key=list(_ITEMS).index):
            missing = [rank for rank in range(self.world_size) if rank not in items[prefix]]
            if missing:
                path = f"{self.location}/{prefix}_world_size_{self.world_size}_rank_{missing[0]}.pt"
                raise NotCommittedError(
                    f"{path} is missing: {self.world_size} ranks saved the checkpoint. The save did not "
                    "finish, or the file was lost. Restore it from a copy, or use an older step",
                    file=path,
                )
            of_ranks = {rank: items[prefix][rank] for rank in range(self.world_size)}
            if prefix == "extra_state":  # a scheduler loads its whole state, so its values stay one object
                self.add_objects(_ITEMS[prefix], of_ranks)
            else:
                self.add_item(_ITEMS[prefix], of_ranks, {})
        step = _STEP.fullmatch(PurePosixPath(self.location).parent.name)
        self.step = int(step[1]) if step else None
        absent = [name for name in _ITEMS if name not in items]
        if absent:
            self.notes.append(f"It has no files {', '.join(absent)}: they were not saved, or are lost.")
        self.notes.append("The format does not store whether all its files belong to one save.")
        if any(re.fullmatch(r"[0-9]+\.optimizer\..+", key) for key in self.tensors):
            self.notes.append(
                "Its optimizer is that of FSDP1: flat parts whose positions are not stored. Each rank has "
                "keys of its own, which fill no optimizer."
            )
        self.conclude()

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a folder that has such a file of a rank."""
        return foreign.file is None and any(map(_FILE.fullmatch, top_level_files(foreign, ".pt")))

    def _ranks(self, foreign: Foreign, counts: Iterable[int]) -> int:
        """The number of ranks that saved.

        The configuration file gives it. Old versions of verl do not write that file. Then the names of the
        files give the number.
        """
        found = sorted(counts)
        if foreign.has(_CONFIG):
            _, config = read_json(self.storage, _CONFIG)
            configured = config.get("world_size")
            if type(configured) is int and configured in found:
                return configured
            if found:
                raise self.fault(
                    _CONFIG, f"world_size is {brief(configured)}, but the files are of {found} ranks"
                )
        if not found:
            raise NotCommittedError(f"{self.location} has no file model_world_size_*_rank_0.pt of verl")
        if len(found) > 1:
            raise self.fault(
                f"model_world_size_{found[0]}_rank_0.pt",
                f"there are files of {' and of '.join(map(str, found))} ranks, from several saves. Move the "
                "files of the older save away",
            )
        return found[0]
