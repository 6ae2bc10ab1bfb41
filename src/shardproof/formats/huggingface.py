"""Reads what Hugging Face's libraries save with ``torch.save``: weights, and folders of training runs.

`HfBinReader` reads ``pytorch_model.bin``: one file, or several with an index. The others read folders of
``Accelerator.save_state`` and of the Trainer of transformers.

A folder has the files of a model as Hugging Face writes them, and one file of ``torch.save`` for each other
item: optimizer, scheduler, states of random number generators. The keys of the model are its own. Keys of
another item begin with the name of its file: ``optimizer.state.0.exp_avg`` is in ``optimizer.bin``.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from shardproof.engine.foreign import Foreign, FormatReader
from shardproof.errors import FormatError, NotCommittedError
from shardproof.formats.json_values import HfIndex, read_json, top_level_files
from shardproof.formats.safetensors_files import NO_CHECKSUMS, SafetensorsReader
from shardproof.formats.torch.torch_save import TorchFilesReader, is_torch_file

_SUFFIX, _INDEX_SUFFIX = ".bin", ".bin.index.json"
_STEMS = ("pytorch_model", "adapter_model", "diffusion_pytorch_model")


class HfBinReader(TorchFilesReader):
    """A folder with ``pytorch_model.bin``, or with an index of such files; see `FormatReader`.

    Example:
        >>> import tempfile, torch
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"weight": torch.arange(6.0).reshape(3, 2)}, f"{folder}/pytorch_model.bin")
        >>> HfBinReader(Foreign(LocalStorage(folder))).tensors["weight"].shape
        (3, 2)
    """

    name = "hf_bin"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        names = [foreign.file] if foreign.file is not None else _bin_files(foreign)
        if not names:
            raise NotCommittedError(
                f"{self.location} has no pytorch_model.bin, and no index", file=self.location
            )
        if len(names) > 1:
            raise FormatError(
                f"{self.location} has {' and '.join(names)}. They may differ: name the one file to read",
                file=self.location,
            )
        if not names[0].endswith(_INDEX_SUFFIX):
            self.add_torch_file(names[0])
            self.conclude()
            return
        index = HfIndex.read(self.storage, names[0])
        for name in sorted(index.keys_of):
            before = self.keys()
            self.add_torch_file(name)
            index.check(name, self.keys() - before)
        self.conclude(index.digest)

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a folder with such files or an index of them, and for an index file."""
        if foreign.file is not None:
            return foreign.file.endswith(_INDEX_SUFFIX)
        return bool(_bin_files(foreign))


def _bin_files(foreign: Foreign) -> list[str]:
    return [
        stem + suffix for stem in _STEMS for suffix in (_INDEX_SUFFIX, _SUFFIX) if foreign.has(stem + suffix)
    ]


_MODEL_SUFFIXES = (
    (".safetensors.index.json", SafetensorsReader),
    (".safetensors", SafetensorsReader),
    (".bin.index.json", HfBinReader),
    (".bin", HfBinReader),
)


class _ItemsReader(TorchFilesReader):
    """A folder with models and other items."""

    item_file: ClassVar[re.Pattern[str]]
    """Pattern of the file names of items that are not models."""

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        self._models: list[tuple[str, FormatReader]] = []
        """Prefix of the keys of each model, and its reader."""
        self._plain: dict[str, Any] = {}
        """Objects of JSON files."""
        names = top_level_files(foreign, "")
        for prefix, model in self._found_models(foreign, names):
            self._add_model(prefix, model)
        folders = foreign.storage.folders()
        if not self._models and not folders:
            raise NotCommittedError(
                f"{self.location} has no model: its save did not finish, or files are missing",
                file=self.location,
            )
        if folders:
            self.notes.append(f"Not read: folders in it, {', '.join(folders[:5])}. Open them by themselves.")
        for name in names:
            if self.item_file.fullmatch(name) and is_torch_file(foreign, name):
                self.add_torch_file(name, f"{name.rpartition('.')[0]}.")
        self.notes.append(
            "No list says which files belong to it: a missing optimizer or scheduler is not found."
        )

    @abstractmethod
    def _found_models(self, foreign: Foreign, names: Sequence[str]) -> Iterable[tuple[str, FormatReader]]:
        """The models in the folder: prefix of the keys, and reader."""

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that are not tensors."""
        yield from self._objects
        yield from self._plain
        for prefix, model in self._models:
            yield from (prefix + key for key in model.object_keys())

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value as plain data; see `FormatReader.object`."""
        if key in self._plain:
            return self._plain[key]
        if key in self._objects:
            return super().object(key, trust_pickle=trust_pickle)
        for prefix, model in self._models:
            if key.startswith(prefix) and key[len(prefix) :] in model.object_keys():
                return model.object(key[len(prefix) :], trust_pickle=trust_pickle)
        raise KeyError(key)

    def files(self) -> Mapping[str, int | None]:
        """All files, with their sizes where a header gives them."""
        found = dict(super().files())
        for _, model in self._models:
            found |= model.files()
        return found

    def verify_extra(self) -> int:
        """Verifies the objects of all items."""
        return super().verify_extra() + sum(model.verify_extra() for _, model in self._models)

    def _add_model(self, prefix: str, model: FormatReader) -> None:
        self._models.append((prefix, model))
        self.tensors |= {prefix + key: tensor for key, tensor in model.tensors.items()}
        self.unreadable |= {prefix + key: value for key, value in model.unreadable.items()}
        self.aliases |= {prefix + key: prefix + other for key, other in model.aliases.items()}
        self.user_metadata = {**model.user_metadata, **self.user_metadata}
        for note in model.notes:
            if not note.startswith("Not read"):
                self.notes.append("Its model: " + note if note == NO_CHECKSUMS else note)

    def _conclude(self) -> None:
        self.conclude(*(model.identity for _, model in self._models))
        self.notes = list(dict.fromkeys(self.notes))


class AccelerateReader(_ItemsReader):
    """A folder of ``Accelerator.save_state``, open for reading; see `FormatReader`.

    The keys of the second model begin with ``model_1.``.
    """

    name = "accelerate"
    item_file = re.compile(
        r"(optimizer|scheduler|sampler|dl_state_dict|scaler|custom_checkpoint|random_states)(_\d+)?\.(bin|pt|pkl)"
    )

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        ranks = {int(name[14:-4]) for name in self._files if re.fullmatch(r"random_states_\d+\.pkl", name)}
        self.world_size = max(ranks, default=0) + 1
        if lost := sorted(set(range(self.world_size)) - ranks):
            raise self.fault(
                f"random_states_{lost[0]}.pkl", "it is missing, but the files of higher ranks are there"
            )
        self._conclude()

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a folder with the random states of rank 0, which a save writes last."""
        return foreign.has("random_states_0.pkl")

    def _found_models(self, foreign: Foreign, names: Sequence[str]) -> Iterable[tuple[str, FormatReader]]:
        for number in range(len(names)):
            end = f"_{number}" if number else ""
            found = [
                (stem + end + suffix, reader)
                for suffix, reader in _MODEL_SUFFIXES
                for stem in ("model", "pytorch_model")
                if stem + end + suffix in names
            ]
            if not found:
                return
            if len(found) > 1:
                raise self.fault(
                    found[1][0], f"it and {found[0][0]} may differ: remove the stale one of the two"
                )
            name, reader = found[0]
            yield f"model{end}." if number else "", reader(Foreign(foreign.storage, name))


class TrainerReader(_ItemsReader):
    """A folder ``checkpoint-<step>`` of the Trainer of transformers, open for reading; see `FormatReader`."""

    name = "hf_trainer"
    item_file = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args)(_\d+)?\.(pt|pth|bin)")

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        _, state = read_json(self.storage, _TRAINER_STATE)
        self._plain = {f"trainer_state.{key}": value for key, value in state.items()}
        step = state.get("global_step")
        self.step = step if type(step) is int else None
        self._conclude()

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a folder with ``trainer_state.json``."""
        return foreign.has(_TRAINER_STATE)

    def files(self) -> Mapping[str, int | None]:
        """All files, with their sizes where a header gives them."""
        return {**super().files(), _TRAINER_STATE: None}

    def _found_models(self, foreign: Foreign, names: Sequence[str]) -> Iterable[tuple[str, FormatReader]]:
        for reader in (SafetensorsReader, HfBinReader):
            if reader.recognizes(foreign):
                yield "", reader(foreign)
                return


_TRAINER_STATE = "trainer_state.json"
