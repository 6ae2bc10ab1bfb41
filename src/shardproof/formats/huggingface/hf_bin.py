"""Reads ``pytorch_model.bin`` of Hugging Face: one file of ``torch.save``, or several with an index."""

from __future__ import annotations

from shardproof.engine.foreign import Foreign
from shardproof.errors import FormatError, NotCommittedError
from shardproof.formats.json_files import HfIndex
from shardproof.formats.torch.torch_save import TorchFilesReader

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
        names = [foreign.file] if foreign.file is not None else _found(foreign)
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
        return bool(_found(foreign))


def _found(foreign: Foreign) -> list[str]:
    return [
        stem + suffix for stem in _STEMS for suffix in (_INDEX_SUFFIX, _SUFFIX) if foreign.has(stem + suffix)
    ]
