"""Reads safetensors: one file, or a folder of Hugging Face with one file or several.

In a folder, the reader takes the files of the index (``model.safetensors.index.json``). Without an index, it
takes the file with the usual name, or else all files. The index must agree with the files. Quantised weights
are read as they are stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from shardproof.engine.foreign import Foreign, FormatReader, StoredBox, StoredView, TensorDescription
from shardproof.engine.format import index_name
from shardproof.errors import FormatError, NotCommittedError, StorageError
from shardproof.formats.embedded_values import PREFIX, EmbeddedValues
from shardproof.formats.json_files import HfIndex, read_json, top_level_files
from shardproof.formats.safetensors.safetensors_header import SafetensorsHeader, read_safetensors_header

NO_CHECKSUMS = "safetensors has no checksums: changed bytes of tensors are not found."
"""Note of every checkpoint of this format."""

_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_OWN_INDEX = index_name("").partition("-")[0] + "-"
_STEMS = ("model", "adapter_model", "diffusion_pytorch_model")
"""Names that the libraries of Hugging Face give their files, without the suffix."""
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def describe_safetensors(header: SafetensorsHeader) -> dict[str, TensorDescription]:
    """The tensors of a file, by key."""
    found = {}
    for key, tensor in header.tensors.items():
        view = StoredView.dense(tensor.shape, header.extent(key))
        found[key] = TensorDescription(tensor.dtype, tensor.shape, StoredBox.whole(tensor.shape, view))
    return found


class SafetensorsReader(FormatReader):
    """Safetensors files, open for reading; see `FormatReader`.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> from shardproof.storage import LocalStorage
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"weight": torch.arange(6.0).reshape(3, 2)}, f"{folder}/model.safetensors")
        >>> reader = SafetensorsReader(Foreign(LocalStorage(folder)))
        >>> reader.tensors["weight"].dtype, reader.tensors["weight"].shape
        ('float32', (3, 2))
    """

    name = "safetensors"

    def __init__(self, foreign: Foreign) -> None:
        super().__init__(foreign)
        self._sizes: dict[str, int] = {}
        self._tensor_bytes = 0
        digest = xxhash.xxh3_128()
        names, index = self._chosen(foreign)
        for name in names:
            header = self._header(name, index)
            digest.update(f"{name}\0".encode())
            digest.update(header.raw)
            self._add(name, header, index)
        self.identity = digest.hexdigest()
        self._embedded = self._read_embedded(next(iter(names), ""))
        if index is not None and index.total_size not in (None, self._tensor_bytes):
            self.notes.append(
                f"The index gives {index.total_size} bytes for all tensors, but they have "
                f"{self._tensor_bytes}."
            )
        self.notes.append(NO_CHECKSUMS)
        if foreign.file is None:
            self._note_config(foreign)

    @classmethod
    def recognizes(cls, foreign: Foreign) -> bool:
        """True for a safetensors file or an index of such files, and for a folder with one of the two.

        shardproof's own index file does not count. It remains in the folder while a step is removed.
        """
        if foreign.file is not None:
            return foreign.file.endswith((_SUFFIX, _INDEX_SUFFIX))
        usual = (stem + suffix for stem in _STEMS for suffix in (_SUFFIX, _INDEX_SUFFIX))
        others = (name for name in top_level_files(foreign, _SUFFIX) if not name.startswith(_OWN_INDEX))
        return any(map(foreign.has, usual)) or any(others)

    def object_keys(self) -> Iterable[str]:
        """Keys of the values that a conversion of shardproof stored. Other writers store no values."""
        return self._embedded.objects

    def object(self, key: str, *, trust_pickle: bool = False) -> Any:
        """A value that a conversion of shardproof stored; see `FormatReader.object`."""
        return self._embedded.object(key)

    def files(self) -> Mapping[str, int | None]:
        """All files, with the sizes that their headers describe."""
        return self._sizes

    def _chosen(self, foreign: Foreign) -> tuple[Sequence[str], HfIndex | None]:
        """Names of the files to read, and their index."""
        if foreign.file is not None:
            if foreign.file.endswith(_INDEX_SUFFIX):
                return self._indexed(foreign.file)
            return [foreign.file], None
        names = top_level_files(foreign, _SUFFIX)
        indices = top_level_files(foreign, _INDEX_SUFFIX)
        usual = [stem + _SUFFIX for stem in _STEMS if stem + _SUFFIX in names]
        if len(indices) + len(usual) > 1:
            raise FormatError(
                f"{self.location} has {' and '.join([*indices, *usual])}. They may differ: name the one file "
                "to read",
                file=self.location,
            )
        if indices:
            return self._indexed(indices[0])
        if not names:
            raise NotCommittedError(f"{self.location} has no file *{_SUFFIX}", file=self.location)
        if usual:
            self._note_unread(set(names).difference(usual))
            return usual, None
        self._check_numbers(names)
        return names, None

    def _indexed(self, name: str) -> tuple[Sequence[str], HfIndex]:
        index = HfIndex.read(self.storage, name)
        self._note_unread(set(top_level_files(Foreign(self.storage), _SUFFIX)).difference(index.keys_of))
        return sorted(index.keys_of), index

    def _check_numbers(self, names: Sequence[str]) -> None:
        """Checks that files named 1 of 3, 2 of 3 and 3 of 3 are all there."""
        found: dict[tuple[str, int], set[int]] = {}
        for name in names:
            if match := _NUMBERED.fullmatch(name):
                found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
        for (stem, count), numbers in found.items():
            if len(numbers) != count or max(numbers) > count:
                raise FormatError(
                    f"{self.location} has {len(numbers)} of {count} files {stem}-*-of-*{_SUFFIX}, and no "
                    "index: restore the missing ones",
                    file=self.location,
                )

    def _header(self, name: str, index: HfIndex | None) -> SafetensorsHeader:
        try:
            return read_safetensors_header(self.storage, name, may_be_cut=True)
        except StorageError as error:
            if not error.details.get("missing") or index is None:
                raise
            path = f"{self.storage.location}/{name}"
            raise StorageError(
                f"{path} is missing. {index.path} names it: restore it from a copy", file=path, missing=True
            ) from error

    def _add(self, name: str, header: SafetensorsHeader, index: HfIndex | None) -> None:
        found = describe_safetensors(header)
        if index is not None:
            index.check(name, [*found, *header.unreadable])
        if doubles := {*found, *header.unreadable} & {*self.tensors, *self.unreadable}:
            key = min(doubles)
            raise self.fault(name, f"{key} is in another file too: name the one file to read", key=key)
        self.tensors |= found
        self.unreadable |= header.unreadable
        self._sizes[name] = header.data_end
        self.note_cut(name, header.size, header.data_end)
        self._tensor_bytes += header.data_end - header.data_start
        self.user_metadata = {**header.metadata, **self.user_metadata}

    def _read_embedded(self, file: str) -> EmbeddedValues:
        """The values that shardproof stored beside the tensors. The other texts are the user's metadata."""
        texts = {key: text for key, text in self.user_metadata.items() if key.startswith(PREFIX)}
        try:
            members = {key: json.loads(text) for key, text in texts.items()}
        except (ValueError, RecursionError) as error:
            raise self.fault(file, f"the texts {', '.join(texts)} are not JSON ({error})") from error
        embedded = EmbeddedValues.of(
            members, self.tensors, self.unreadable, lambda text: self.fault(file, text)
        )
        self.aliases = dict(embedded.aliases)
        self.unreadable |= embedded.unreadable
        others = {key: text for key, text in self.user_metadata.items() if key not in texts}
        self.step, self.user_metadata = embedded.step, {**others, **embedded.metadata}
        return embedded

    def _note_unread(self, names: Iterable[str]) -> None:
        if unread := sorted(names):
            self.notes.append(f"Not read, because they are not part of it: {', '.join(unread[:5])}.")

    def _note_config(self, foreign: Foreign) -> None:
        if foreign.has("adapter_config.json"):
            self.notes.append("It is an adapter: it does not have the weights of its base model.")
        if not foreign.has("config.json"):
            return
        try:
            _, config = read_json(self.storage, "config.json")
        except FormatError as error:
            self.notes.append(f"{error.message}.")
            return
        ties = config.get("tie_word_embeddings") is True
        if ties and not any(key.endswith("lm_head.weight") for key in self.tensors):
            self.notes.append(
                "config.json ties the output layer to the embedding: the file has only the embedding, and no "
                "key lm_head.weight."
            )
