"""Names files that are no checkpoint, and says what to do: pointers, pages, models, cut downloads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shardproof.engine.storage import Storage
from shardproof.errors import FormatError, StorageError

_FIRST_BYTES = 512
_LAST_BYTES = 1 << 20
"""Bytes at the end of a zip archive that are searched for its end record and for the names of its records."""
_AGAIN = "Download or copy it again"
_SCRIPT = "Load it with torch.jit.load, and save its state_dict() with torch.save"
_PROGRAM = "Load it with torch.export.load, and save its state_dict with torch.save"
_SOURCE = "Use the checkpoint that it was made from"
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\s(.*\s)?size (\d+)", re.DOTALL)
_STARTS = (
    (b"<", "is an HTML or XML page, which a server sent instead of the file. Check its address and your "
     f"access. {_AGAIN}"),
    (b"GGUF", f"is a GGUF model. {_SOURCE}"),
    (b"\x89HDF\r\n", f"is an HDF5 file, as Keras writes it. {_SOURCE}"),
    (b"\x93NUMPY", "is a numpy array. Load it with numpy.load, and save it with torch.save"),
    (b"\x1f\x8b", "is compressed by gzip. Decompress it"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd. Decompress it"),
)  # fmt: skip
_RECORDS = (
    (b"/code/__torch__", f"is a TorchScript module. {_SCRIPT}"),
    (b"/models/model.json", f"is an exported program of torch.export. {_PROGRAM}"),
    (b"serialized_exported_program", f"is an exported program of torch.export. {_PROGRAM}"),
    (b".npy", "holds arrays of numpy. Load it with numpy.load, and save them with torch.save"),
)
_MODELS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Ends of names of files that are downloaded. Other empty files have errors of their own."""
_END_OF_ZIP = b"PK\x05\x06"


def other_file(storage: Storage, name: str) -> str | None:
    """The predicate of a sentence about a file that is no checkpoint, with advice; None for any other file.

    Args:
        storage: the folder of the file.
        name: name of the file.

    Raises:
        StorageError: the file cannot be read.

    >>> import tempfile
    >>> from shardproof.storage import LocalStorage
    >>> storage = LocalStorage(tempfile.mkdtemp())
    >>> storage.publish("a.pt", b"GGUF" + bytes(60))
    >>> other_file(storage, "a.pt")
    'is a GGUF model. Use the checkpoint that it was made from'
    """
    size = storage.size(name)
    if size is None:
        return None
    if not size:
        return f"is empty. {_AGAIN}" if name.endswith(_MODELS) else None
    begin = storage.read(name, 0, min(size, _FIRST_BYTES))
    if pointer := _LFS.match(begin):
        return (
            f"is a Git LFS pointer, and not the file of {int(pointer[2])} bytes: run `git lfs pull` in its "
            "repository"
        )
    for start, text in _STARTS:
        if begin.lstrip().startswith(start):
            return text
    if name.endswith(".onnx"):
        return f"is an ONNX model. {_SOURCE}"
    if not begin.startswith(b"PK\x03\x04"):
        return None
    end = storage.read(name, max(size - _LAST_BYTES, 0), size)
    if _END_OF_ZIP not in end:
        return f"is the beginning of a zip archive: it was cut. {_AGAIN}"
    return next((text for record, text in _RECORDS if record in end), None)


@contextmanager
def naming_other_files(storage: Storage) -> Iterator[None]:
    """Replaces a `FormatError` about a file in `storage` by one that names the file for what it is.

    The errors of other files stay as they are.
    """
    try:
        yield
    except FormatError as error:
        name = str(error.details.get("file", "")).removeprefix(f"{storage.location}/")
        try:
            found = other_file(storage, name) if name else None
        except StorageError:
            found = None
        if found is None:
            raise
        path = f"{storage.location}/{name}"
        raise FormatError(f"{path} {found}", **{**error.details, "file": path}) from error
