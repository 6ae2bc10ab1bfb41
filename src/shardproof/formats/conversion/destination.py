"""Where a conversion puts the new checkpoint when it is complete: a path, or a prefix of an object store.

Note "The marker object": an object store has neither locks nor a rename of folders. So `begin` creates the
object ``DST.converting`` with the digest of the plan, before anything is written. It shows that this process
may write there, and that the objects at the destination belong to this plan. An interrupted conversion
continues with these objects, even without its work folder, because equal plans write equal files.

Note "Nothing is replaced": an object that exists already is compared with the file, and never replaced. The
file that makes the checkpoint visible is written last, and its PUT fails if an object of that name exists. A
multipart upload cannot have this condition. So if another program writes such an object at the same time,
only the comparison finds it.

Note "Dead uploads": a process that dies in a multipart upload leaves parts that no list of objects shows. A
conversion that resumes after an interruption waits until all its objects are complete. Then no process of
this conversion uploads any more, so it aborts the remaining uploads of these objects.
"""

from __future__ import annotations

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from shardproof._utils.humanize import listed
from shardproof.engine.storage import (
    FileWriter,
    LocalStorage,
    ObjectStorage,
    aligned_buffer,
    is_bucket_url,
    is_url,
    publish_path,
    storage_at,
)
from shardproof.errors import AlreadyCommittedError, StorageError, StructureError

FILES = "files"
"""Name of the folder of the new checkpoint in the work folder."""
_FORMATS_OF_FILES = {
    ".safetensors": ("safetensors", "hf"),
    ".pt": ("torch",),
    ".pth": ("torch",),
    ".bin": ("torch",),
    ".ckpt": ("torch",),
}
"""Suffix of the name of a file to the formats that it can have. Other names are those of folders."""
_UNWRITTEN = frozenset({".gguf", ".ggml", ".onnx", ".h5", ".keras", ".npy", ".npz", ".msgpack", ".tflite"})
"""Suffixes of files of formats that are not written. A folder of such a name would be taken for a file."""
_log = logging.getLogger("shardproof")
_PIECE_BYTES = 8 << 20
"""Bytes of one read of a file, and of one request that reads its object again."""
_REQUESTS = 8
"""Requests of small files, and of comparisons, in flight."""


class NewCheckpoint(ABC):
    """The place of the new checkpoint. The coordinator calls `begin`, `publish` and `end`."""

    passes: ClassVar[int]
    """Number of times that the conversion reads or writes each byte of the new checkpoint, for progress."""
    location: str
    is_file: bool
    """True if the new checkpoint is one file."""
    work_path: Path
    """The work folder of conversions to this destination."""
    space_advice: str
    """What to do if the work folder has too little space."""
    work_advice: str
    """What to do if the work folder cannot be made, or is not safe."""

    def check_format(self, to: str) -> None:
        """Checks that a name of a file fits the format to write."""
        suffix = os.path.splitext(self.location)[1]
        if suffix.lower() in _UNWRITTEN:
            raise StructureError(
                f"{self.location} names a file of a format that is not written: for the format {to}, choose "
                f"a name without {suffix}"
            )
        if self.is_file and to not in _FORMATS_OF_FILES[suffix]:
            formats = " or ".join(_FORMATS_OF_FILES[suffix])
            raise StructureError(
                f"{self.location} names a file of the format {formats}, and the format to write is {to}: "
                f"choose a name without {suffix}, or another format"
            )

    def check_files(self, count: int) -> None:
        """Checks that a checkpoint of some files fits the name.

        Raises:
            StructureError: the name is of one file, and there are several.
        """
        if self.is_file and count != 1:
            raise StructureError(
                f"{self.location} names a file, and the checkpoint has {count} files. Give a folder, or no "
                "--max-file-size, or a larger one"
            )

    @abstractmethod
    def begin(self, digest: str) -> None:
        """Checks that a conversion may write here.

        Raises:
            AlreadyCommittedError: there is something at the destination.
            StructureError: the destination has the objects of another plan.
            StorageError: the bucket is missing, or does not accept the credentials or the object.
        """

    @abstractmethod
    def publish(self, files: LocalStorage, names: Sequence[str], last: str) -> None:
        """Makes the new checkpoint visible, with the file `last` at the end.

        Raises:
            AlreadyCommittedError: something appeared at the destination meanwhile.
            StorageError: the storage failed, or the last object has other bytes than the file.
        """

    @abstractmethod
    def end(self) -> None:
        """Removes what `begin` created at the destination. Called after the removal of the work folder."""


class FolderDestination(NewCheckpoint):
    """A path of a file system."""

    passes = 2  # written and verified

    def __init__(self, path: str) -> None:
        self._path = LocalStorage(os.path.abspath(path)).path
        self.location = str(self._path)
        self.is_file = _is_file_name(self._path.name)
        self.work_path = self._path.with_name(f"{self._path.name}.converting")
        self.space_advice = "choose a destination on another file system"
        self.work_advice = "Remove it, or choose another destination"

    def begin(self, digest: str) -> None:
        """Raises if there is something at the destination; see `NewCheckpoint.begin`."""
        if os.path.lexists(self._path):
            raise _exists(self.location)

    def publish(self, files: LocalStorage, names: Sequence[str], last: str) -> None:
        """Moves the new checkpoint to its place; see `NewCheckpoint.publish`."""
        source = self.work_path / FILES
        publish_path(source / names[0] if self.is_file else source, self._path)

    def end(self) -> None:
        """Does nothing: `begin` creates nothing."""


class BucketDestination(NewCheckpoint):
    """A prefix of an object store, or one object.

    Raises:
        StructureError: it names a whole bucket.
        StorageError: it is not valid.
    """

    passes = 4  # written and verified, sent and compared

    def __init__(self, url: str, temporary: str) -> None:
        self._folder = ObjectStorage(url)
        self._name = self._folder.folder
        self.location = self._folder.location
        if not self._name:
            raise StructureError(
                f"{self.location} is a whole bucket: give a prefix in it, such as {self.location}/checkpoint"
            )
        self._above = ObjectStorage(self.location.rpartition("/")[0])
        self._mark = f"{self._name}.converting"
        """Name of the marker object."""
        self._was_interrupted = False
        """True if an earlier process created the marker object. Its uploads may be dead."""
        self.is_file = _is_file_name(self._name)
        name = hashlib.sha256(self.location.encode()).hexdigest()[:32]
        self.work_path = Path(temporary) / f"shardproof-{name}.converting"
        self.space_advice = "set TMPDIR to a folder of another file system"
        self.work_advice = "Set TMPDIR to a folder of your own"

    def begin(self, digest: str) -> None:
        """Creates the marker object; see note "The marker object"."""
        mark = f"{self._above.location}/{self._mark}"
        self._was_interrupted = self._above.size(self._mark) is not None
        if not self._was_interrupted:
            if self._above.size(self._name) is not None or self._folder.list():
                raise _exists(self.location)
            self._above.publish(self._mark, digest.encode())
        elif (found := self._above.read(self._mark).decode(errors="replace")) != digest:
            raise StructureError(
                f"{mark} is left from an interrupted conversion with another source or other options (plan "
                f"{found[:32]}, now {digest}). Repeat that conversion, or remove this object and all below "
                f"{self.location}"
            )

    def upload(self, files: LocalStorage, names: Sequence[str], on_bytes: Callable[[int], None]) -> None:
        """Uploads a large file, or some small ones, except those whose objects exist. Compares all objects.

        Args:
            files: where the files are.
            names: of the files.
            on_bytes: called with the bytes that were sent or compared since the last call.

        Raises:
            StorageError: an object has other bytes than its file, or a storage failed.
        """

        def compare(piece: tuple[str, int, int]) -> int:
            name, start, stop = piece
            target, there = self._object(name)
            if target.read(there, start, stop) != files.read(name, start, stop):
                raise self._differs(name, f"other bytes between {start} and {stop}")
            return stop - start

        with ThreadPoolExecutor(_REQUESTS, "shardproof-upload") as pool:
            if len(names) == 1:
                sizes = [self._send(files, names[0], on_bytes)]
            else:
                sizes = []
                for size in pool.map(lambda name: self._send(files, name, lambda count: None), names):
                    sizes.append(size)
                    on_bytes(size)
            pieces = [
                (name, start, min(start + _PIECE_BYTES, size))
                for name, size in zip(names, sizes, strict=True)
                for start in range(0, size, _PIECE_BYTES)
            ]
            for count in pool.map(compare, pieces):
                on_bytes(count)

    def _send(self, files: LocalStorage, name: str, on_bytes: Callable[[int], None]) -> int:
        """Uploads a file unless its object exists. Returns the size of both."""
        target, there = self._object(name)
        size = files.size(name)
        assert size is not None
        if target.size(there) is None:
            buffer = aligned_buffer(max(min(size, _PIECE_BYTES), 1))
            with FileWriter(target.create(there, size), buffer) as file:
                while file.size < size:
                    piece = file.room()[: size - file.size]
                    files.read_into(name, file.size, piece)
                    file.advance(len(piece))
                    on_bytes(len(piece))
                file.finish()
        if (found := target.size(there)) != size:
            raise self._differs(name, f"{found} bytes, expected {size}")
        return size

    def _object(self, name: str) -> tuple[ObjectStorage, str]:
        """The storage and name of the object of a file."""
        return (self._above, self._name) if self.is_file else (self._folder, name)

    def publish(self, files: LocalStorage, names: Sequence[str], last: str) -> None:
        """Uploads the last file. A checkpoint of one file is already visible."""
        if len(names) > 1:
            self._publish_last(files, names, last)
        if self._was_interrupted:
            self._abort_uploads(names)

    def _publish_last(self, files: LocalStorage, names: Sequence[str], last: str) -> None:
        if other := {*names} ^ {*self._folder.list(), last}:
            raise AlreadyCommittedError(
                f"{self.location}: another program wrote or removed objects during the conversion: "
                f"{listed(other)}. Nothing was published: choose another destination, or remove "
                "the objects that another program wrote, and repeat the conversion",
                path=self.location,
            )
        data = files.read(last)
        self._folder.publish(last, data)
        if self._folder.read(last) != data:
            raise self._differs(last, "other bytes")

    def _abort_uploads(self, names: Sequence[str]) -> None:
        """Removes the parts of interrupted uploads of these files; see note "Dead uploads"."""
        storage, _ = self._object(names[0])
        objects = {self._object(name)[1] for name in names}
        try:
            for upload in storage.uploads(parts_before=0.0):
                if upload.name in objects:
                    storage.abort_upload(upload)
        except StorageError as error:
            _log.warning(
                "%s is complete. Parts of interrupted uploads may stay in the bucket until a lifecycle rule "
                "aborts incomplete multipart uploads: %s",
                self.location,
                error,
            )

    def end(self) -> None:
        """Removes the marker object; see `NewCheckpoint.end`."""
        try:
            self._above.delete(self._mark)
        except StorageError as error:
            _log.warning("%s is complete, but its marker object was not removed: %s", self.location, error)

    def _differs(self, name: str, how: str) -> StorageError:
        target, there = self._object(name)
        file = f"{target.location}/{there}"
        return StorageError(
            f"{file} has {how}: another program wrote it, or it was damaged in transit. The new checkpoint "
            "is not complete: remove the object, and repeat the conversion",
            file=file,
        )


def destination_at(location: str, temporary: str) -> NewCheckpoint:
    """The destination that a path or URL names.

    Raises:
        StructureError: it is the URL of a run in memory, or of a whole bucket.
        StorageError: it is not valid.
    """
    if is_bucket_url(location):
        return BucketDestination(location, temporary)
    if is_url(location):
        raise StructureError(
            f"{location} is the URL of a run in memory, and a conversion writes to a folder or to an object "
            "store: give one of these"
        )
    storage_at(location)  # raises for the URL of an unknown store
    return FolderDestination(location)


def _exists(location: str) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"{location} exists. It was not touched: choose another destination, or remove it", path=location
    )


def _is_file_name(name: str) -> bool:
    """True if a destination of this name is a file.

    >>> _is_file_name("model.safetensors"), _is_file_name("step-00001000")
    (True, False)
    """
    return os.path.splitext(name)[1] in _FORMATS_OF_FILES
