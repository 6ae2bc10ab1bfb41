"""Reads manifest and index of a checkpoint, and finds its shard files and checks their sizes.

A file that is no checkpoint is named for what it is: a pointer, a page, a model, a cut download.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardproof.engine.format.file_names import MANIFEST_NAME
from shardproof.engine.format.index import decode_index, index_remedy
from shardproof.engine.format.manifest import (
    MAX_MANIFEST,
    SEAL_LENGTH,
    FileRecord,
    Manifest,
    check_end,
    decode_manifest,
)
from shardproof.engine.planning import ChunkTable
from shardproof.engine.storage import Storage, file_sizes, too_large
from shardproof.errors import FormatError, NotCommittedError, StorageError

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


_LARGE_MANIFEST = 64 << 20
"""Bytes of a manifest whose end is read first."""


def read_manifest(storage: Storage) -> Manifest:
    """Reads the manifest of the checkpoint in `storage`.

    Raises:
        NotCommittedError: there is no manifest, so no committed checkpoint.
        FormatError: the manifest is damaged.
        StorageError: the manifest cannot be read.
    """
    try:
        data = read_manifest_text(storage)
    except StorageError as error:
        if not error.details.get("missing"):
            raise
        raise NotCommittedError(
            f"{storage.location} holds no committed checkpoint: there is no {MANIFEST_NAME}. The save "
            "failed or is still running, or the path is wrong. `shardproof repair` can commit a save whose "
            "files are complete.",
            path=storage.location,
        ) from error
    with naming_other_files(storage):
        return decode_manifest(data, f"{storage.location}/{MANIFEST_NAME}")


def read_manifest_text(storage: Storage) -> bytes:
    """The bytes of `manifest.json`, which `decode_manifest` checks.

    Of a large file it reads the end first, so that a file that is no manifest needs no memory. A storage that
    can bound a read is sent one request.

    Raises:
        FormatError: the file has more than 4 GiB, or more than 64 MiB and not the end of a manifest.
        StorageError: the manifest is missing or cannot be read.
    """
    if storage.bounds_reads:
        return storage.read_at_most(MANIFEST_NAME, MAX_MANIFEST)
    size = storage.size(MANIFEST_NAME) or 0
    path = f"{storage.location}/{MANIFEST_NAME}"
    if size > MAX_MANIFEST:
        raise too_large(path, size, MAX_MANIFEST)
    if size > _LARGE_MANIFEST:
        check_end(storage.read(MANIFEST_NAME, size - SEAL_LENGTH, size), path)
    return storage.read(MANIFEST_NAME)


def read_index(storage: Storage, manifest: Manifest) -> ChunkTable:
    """Reads the chunk table of a checkpoint and checks it against the manifest (see `decode_index`).

    Raises:
        FormatError: the index is missing, damaged or of another checkpoint.
        StorageError: the index cannot be read.
    """
    name = manifest.index.name
    file = f"{storage.location}/{name}"
    fault = size_fault(storage, name, manifest.index.size)
    if fault is not None:
        raise FormatError(
            f"{file}: {fault[0]}. {index_remedy(manifest)}",
            file=name,
            missing=fault[1],
        )
    return decode_index(storage.read(name), manifest, file)


def metadata_files(storage: Storage) -> dict[str, bytes]:
    """The bytes of manifest and index by name, as they are stored.

    Raises:
        StorageError, NotCommittedError, FormatError: they cannot be read, or the manifest is damaged.
    """
    data = read_manifest_text(storage)
    index = decode_manifest(data, f"{storage.location}/{MANIFEST_NAME}").index.name
    return {MANIFEST_NAME: data, index: storage.read(index)}


def locate_files(storage: Storage, manifest: Manifest) -> list[tuple[Storage, str]]:
    """The storage and the name of each shard file, in the order of `manifest.files`.

    Files of one folder share one storage, unless the folder has copies (`Storage.nearest`). To close all
    files, close each storage once.
    """
    storages = {"": storage}
    located = []
    for record in manifest.files:
        if record.folder not in storages:
            storages[record.folder] = storage.sibling(record.folder)
        folder = storages[record.folder]
        located.append((folder.nearest(record.name), record.name))
    return located


def lost_files(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """Finds shard files that are missing or have another size than the manifest records. Reads no file.

    Returns the fault by `FileRecord.place` of each such file.

    Raises:
        StorageError: the storage cannot tell a size.
    """
    lost = {}
    for (folder, _), record in zip(locate_files(storage, manifest), manifest.files, strict=True):
        error = size_error(folder, record)
        if error is not None:
            lost[record.place] = error.message
    return lost


def read_seal(storage: Storage) -> bytes | None:
    """Reads the last bytes of a manifest, which hold its digest and so identify the commit.

    Returns:
        The bytes; None if there is no manifest, or one that is too short to have a seal. A manifest that is
        removed meanwhile counts as none.

    Raises:
        StorageError: the manifest cannot be read.
    """
    size = storage.size(MANIFEST_NAME)
    if size is None or size < SEAL_LENGTH:
        return None
    try:
        return storage.read(MANIFEST_NAME, size - SEAL_LENGTH, size)
    except StorageError as error:
        if error.details.get("missing"):
            return None
        raise


def size_fault(storage: Storage, name: str, size: int) -> tuple[str, bool] | None:
    """Compares the size of a file with the expected one, without reading the file.

    Returns None if the sizes are equal; else the fault in words, and whether the file is missing.

    Raises:
        StorageError: the storage cannot tell the size.
    """
    return _fault(storage.size(name), size)


def _fault(found: int | None, size: int) -> tuple[str, bool] | None:
    if found == size:
        return None
    return f"expected {size} bytes, {'it is missing' if found is None else f'it has {found}'}", found is None


def size_error(
    storage: Storage, record: FileRecord, *, path: str | None = None, advice: str = ""
) -> StorageError | None:
    """The error for a shard file whose size is not the recorded one; None if the sizes are equal.

    Args:
        storage: the folder that holds the file (see `locate_files`).
        record: record of the file, in the manifest.
        path: what the message calls the file; None: `FileRecord.place`.
        advice: sentences that end the message.

    Raises:
        StorageError: the storage cannot tell the size.
    """
    return _size_error(storage.size(record.name), record, path or record.place, advice)


def _size_error(found: int | None, record: FileRecord, path: str, advice: str) -> StorageError | None:
    fault = _fault(found, record.size)
    if fault is None:
        return None
    text, missing = fault
    end = f". {advice}" if advice else ""
    return StorageError(f"{path}: {text}{end}", file=record.place, missing=missing)


def check_size(storage: Storage, record: FileRecord) -> None:
    """Checks that a shard file has its recorded size; see `size_error`.

    Raises:
        StorageError: the file is missing or has another size, or the storage cannot tell. Only in the first
            case the details have ``missing=True``.
    """
    error = size_error(storage, record)
    if error is not None:
        raise error


def check_sizes(
    files: Sequence[tuple[Storage, FileRecord]], advice: Callable[[FileRecord], str] | None = None
) -> None:
    """Checks that shard files have their recorded sizes; see `size_errors`.

    Raises:
        StorageError: as of `check_size`, for the first file with a fault.
    """
    errors = size_errors(files, advice)
    if errors:
        raise errors[0]


def size_errors(
    files: Sequence[tuple[Storage, FileRecord]], advice: Callable[[FileRecord], str] | None = None
) -> list[StorageError]:
    """The errors of the shard files whose sizes are not the recorded ones. Asks for many sizes at a time.

    Args:
        files: the folder that holds each file, and the file's record.
        advice: returns the sentences that end the message for a record.

    Raises:
        StorageError: the storage cannot tell a size.
    """
    sizes = file_sizes([(storage, record.name) for storage, record in files])
    errors = (
        _size_error(
            found,
            record,
            f"{storage.location}/{record.name}",
            "" if advice is None else advice(record),
        )
        for (storage, record), found in zip(files, sizes, strict=True)
        if found != record.size
    )
    return [error for error in errors if error is not None]
