"""`ObjectStorage`: files as objects of S3, Google Cloud Storage or Azure, through obstore.

Note "What commits": `publish` without `replace` is one PUT that the store accepts only if there is no object
of the name (``If-None-Match: *``). So exactly one of several committers succeeds. Data files are written
before, under names that contain the attempt. Before its first such PUT, a process tests whether the store
honours the condition.

Note "A lost answer": a PUT may succeed and its answer may be lost. The repeated PUT then finds the object of
the first. So if the object has the bytes to write, the PUT counts as done. A manifest names
its attempt, so no other committer writes the same bytes.

Note "Deadlines": obstore repeats a request after a failure of the server or the connection, with growing
pauses, for at most `retry_timeout`. An error after that names this time. An operation of many requests can
have one such wait in place of several: see `ObjectStorage.with_one_wait`.
"""

from __future__ import annotations

import builtins
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shardproof._utils.forks import lock
from shardproof._utils.humanize import without_credentials
from shardproof.engine.storage.base import Sink, Storage, check_folder, check_name, too_large
from shardproof.engine.storage.multipart_uploads import MultipartUploads, Upload
from shardproof.engine.storage.remote_requests import ObjectSink, request_error, short_remote_read
from shardproof.errors import AlreadyCommittedError, ShardproofError, StorageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
"""Schemes of the URLs that name an object store."""
_S3_SCHEMES = ("s3", "s3a")
_RETRY_SECONDS = 120
_REQUEST_BYTES = 16 << 20
"""Bytes of one request of a read. A request has 30 s, unless `client_options` set another timeout."""
_HONOURING: set[str] = set()
"""Buckets that honour conditional PUTs, by endpoint and URL; see note "What commits"."""

_Result = TypeVar("_Result")

_log = logging.getLogger("shardproof")


@dataclass(slots=True)
class _Silence:
    """The first error of a store that does not answer; see `ObjectStorage.with_one_wait`."""

    error: StorageError | None = None


class ObjectStorage(Storage):
    """Files below a prefix of a bucket; see `Storage`.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        options: settings of the store as obstore names them, such as ``endpoint``, ``region`` or
            ``access_key_id``; and ``client_options`` and ``retry_config``, which obstore describes. None:
            everything from the environment, as the SDK of the store finds it.

    Raises:
        StorageError: the URL or an option is not valid.
        ImportError: obstore is not installed (the extra ``cloud``).
    """

    is_remote = True
    bounds_reads = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme.lower() not in SCHEMES or not bucket:
            shown = without_credentials(url)
            raise StorageError(
                f"{shown!r} names no bucket. Give s3://bucket/prefix, gs:// or az://", file=shown
            )
        if (shown := without_credentials(url)) != url:
            raise StorageError(
                f"{shown!r} has credentials, which logs and errors would repeat. Give them in "
                "storage_options, or in the variables of the environment that the store's own tools read",
                file=shown,
            )
        self._bucket = f"{scheme.lower()}://{bucket}"
        self._prefix = "/".join(part for part in prefix.split("/") if part)
        if self._prefix:
            check_name(self._prefix, self._bucket)
        settings = dict(options or {})
        self._has_options = bool(settings)
        retry: Mapping[str, Any] = settings.pop("retry_config", None) or {}
        self._retry: dict[str, Any] = {
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
            "max_retries": 1000,
            **retry,
        }
        self._endpoint = _endpoint(settings)
        self._store = _open(self._bucket, settings, self._endpoint, self._retry)
        self._known: Mapping[str, bytes] = {}
        self._silence: _Silence | None = None

    @classmethod
    def _of(cls, other: ObjectStorage, prefix: str) -> ObjectStorage:
        """The part of a bucket below another prefix."""
        storage = cls.__new__(cls)
        storage._bucket, storage._prefix = other._bucket, prefix
        storage._retry, storage._store, storage._endpoint = other._retry, other._store, other._endpoint
        storage._known, storage._silence = {}, other._silence
        storage._has_options = other._has_options
        return storage

    def with_contents(self, files: Mapping[str, bytes]) -> ObjectStorage:
        """The same storage with the bytes of some files; see `Storage.with_contents`."""
        storage = ObjectStorage._of(self, self._prefix)
        storage._known = dict(files)
        return storage

    def with_one_wait(self) -> ObjectStorage:
        """The same storage for one operation, which waits once for a store that does not answer.

        After a request without an answer, all later requests raise its error at once.
        """
        storage = ObjectStorage._of(self, self._prefix)
        storage._silence = _Silence()
        return storage

    def __repr__(self) -> str:
        return f"ObjectStorage({self.location!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStorage) and other._identity == self._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, str]:
        return self._endpoint, self.location

    @property
    def location(self) -> str:
        """The URL."""
        return f"{self._bucket}/{self._prefix}" if self._prefix else self._bucket

    @property
    def has_options(self) -> bool:
        """True if it was opened with options: another process cannot open it by its URL alone."""
        return self._has_options

    @property
    def folder(self) -> str:
        """The last part of the prefix."""
        return self._prefix.rpartition("/")[2]

    @property
    def linked(self) -> bool:
        """False: object stores have no links."""
        return False

    def create(self, name: str, size: int = 0) -> Sink:
        """Begin a new file; see `Storage.create`.

        Args:
            name: name of the file.
            size: bytes that it will have, if they are known. A file of more than 156 GiB needs it.
        """
        file = f"{self.location}/{name}"
        if self.size(name) is not None:
            raise StorageError(f"cannot create {file}: there is already an object of this name", file=file)

        def put(data: Any, **how: Any) -> None:
            if how.get("mode") != "create":
                self._put(name, data, "write", **how)
            elif not self._put_new(name, data, "write") and not self._has(name, data):
                raise StorageError(f"cannot write {file}: there is already an object of this name", file=file)

        return ObjectSink(put, file, size)

    def replace(self, name: str) -> Sink:
        """Begin a file that replaces another; see `Storage.replace`."""

        def put(data: Any, **how: Any) -> None:
            self._put(name, data, "write", **{**how, "mode": "overwrite"})

        return ObjectSink(put, f"{self.location}/{check_name(name, self.location)}")

    def publish(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Make `data` appear under `name`; see `Storage.publish` and the note "What commits"."""
        check_name(name, self.location)
        if replace:
            self._put(name, data, "publish", use_multipart=False)
            return
        self._check_conditional_puts()
        file = f"{self.location}/{name}"
        ends = time.monotonic() + self._retry["retry_timeout"].total_seconds()
        while not (self._put_new(name, data, "publish") or self._has(name, data)):
            if self.size(name) is not None:
                raise AlreadyCommittedError(f"{file} is there already: another save published it", file=file)
            # A store may answer "conflict" while it still carries out another request for this object.
            if time.monotonic() > ends:
                text = (
                    f"cannot publish {file}: the store carries out another request for it, which has not "
                    "ended. It may be an earlier one of this process"
                )
                raise request_error(text, file, missing=False, unanswered=True)
            time.sleep(_CONFLICT_SECONDS)

    def _has(self, name: str, data: bytes) -> bool:
        """True if the object has these bytes already; see note "A lost answer"."""
        return self.size(name) == len(data) and self.read(name) == data

    def _put_new(self, name: str, data: bytes, doing: str) -> bool:
        """Writes an object if there is none of this name. False if there is one."""
        from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError

        ends = time.monotonic() + self._retry["retry_timeout"].total_seconds()
        while True:
            begun = time.monotonic()
            try:
                self._put(name, data, doing, mode="create", use_multipart=False)
                return True
            except StorageError as error:
                if isinstance(error.__cause__, (AlreadyExistsError, PreconditionError)):
                    return False
                # obstore does not repeat a conditional PUT whose answer did not come in time. After such an
                # answer, a repeated PUT takes as long again.
                now = time.monotonic()
                if not isinstance(error.__cause__, GenericError) or now + (now - begun) > ends:
                    raise

    def _check_conditional_puts(self) -> None:
        """Raises if the store does not honour ``If-None-Match``; tested once in a process."""
        place = f"{self._endpoint} {self._bucket}"
        with _PROBE_LOCK:
            if place in _HONOURING:
                return
            name = f"conditional-put-{uuid.uuid4().hex}.probe"
            # No other process uses this name, so a conflict in either request shows that the store tests it.
            is_ignored = self._put_new(name, b"1", "test") and self._put_new(name, b"2", "test")
            try:
                self.delete(name)
            except StorageError as error:
                _log.warning("an object of a test stays: %s", error)
            if is_ignored:
                raise StorageError(
                    f"{self._bucket} does not honour conditional writes (If-None-Match: *): two jobs could "
                    "commit one step, and each would believe it won. Save to a store that does",
                    file=self.location,
                )
            _HONOURING.add(place)

    def flush(self, name: str) -> None:
        """Does nothing: an object is durable when its PUT returns. A missing object is an error."""
        if self.size(name) is None:
            raise self._missing(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `start` to `stop`; see `Storage.read`."""
        known = self._known.get(name)
        if known is not None and start <= (len(known) if stop is None else stop) <= len(known):
            return known[start:stop]
        if stop is None:
            data = self._whole(name)  # of one version of the object
            if start > len(data):
                raise short_remote_read(f"{self.location}/{name}", start, start, len(data))
            return data[start:]
        if stop <= start:
            if self.size(name) is None:
                raise self._missing(name)
            return b""
        return bytes(self._range(name, start, stop))

    def read_at_most(self, name: str, most: int) -> bytes:
        """All bytes of an object; see `Storage.read_at_most`. The answer begins with its size."""
        if name in self._known and len(self._known[name]) <= most:
            return self._known[name]
        return self._whole(name, most)

    def _whole(self, name: str, most: int | None = None) -> bytes:
        """All bytes of one version of the object. Raises FormatError if there are more than `most`."""
        import obstore

        def request() -> bytes:
            found = obstore.get(self._store, self._key(name))
            if most is not None and found.meta["size"] > most:
                raise too_large(f"{self.location}/{name}", found.meta["size"], most)
            return bytes(found.bytes())

        return self._ask("read", name, request)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` on, in requests of limited size; see `Storage.read_into`."""
        if len(buffer):
            target = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
            for done in range(0, len(target), _REQUEST_BYTES):
                part = target[done : done + _REQUEST_BYTES]
                part[:] = self._range(name, start + done, start + done + len(part))
        elif self.size(name) is None:
            raise self._missing(name)

    def read_buffer(self, name: str, start: int, count: int) -> memoryview:
        """Read a range into memory of obstore; see `Storage.read_buffer`."""
        if 0 < count <= _REQUEST_BYTES:
            return self._range(name, start, start + count)
        data = memoryview(bytearray(count))
        self.read_into(name, start, data)
        return data

    def _range(self, name: str, start: int, stop: int) -> memoryview:
        import obstore

        def request() -> memoryview:
            return memoryview(obstore.get_range(self._store, self._key(name), start=start, end=stop))

        try:
            data = self._ask("read", name, request)
        except StorageError as error:
            # Only such an answer is worth a second request, which may take as long as the first.
            cause = error.__cause__
            is_short = isinstance(cause, Exception) and "status code: 416 " in _first_line(cause)
            size = self.size(name) if is_short else None
            if size is not None and size <= start:
                raise short_remote_read(f"{self.location}/{name}", start, stop, size) from error
            raise
        if len(data) != stop - start:
            raise short_remote_read(f"{self.location}/{name}", start, stop, start + len(data))
        return data

    def size(self, name: str) -> int | None:
        """Bytes of the object; None if there is none of this name."""
        import obstore

        if name in self._known:
            return len(self._known[name])
        found = self._ask_for("look at", name, lambda: obstore.head(self._store, self._key(name)))
        return None if found is None else int(found["size"])

    def modified(self, name: str) -> float | None:
        """Time of the last write to an object, Unix seconds; None if there is none of this name."""
        import obstore

        found = self._ask_for("look at", name, lambda: obstore.head(self._store, self._key(name)))
        return None if found is None else float(found["last_modified"].timestamp())

    def now(self, *, writes: bool = True) -> float | None:
        """The time by the clock of the store, Unix seconds; see `Storage.now`.

        The header of an answer has it. If obstore cannot sign a request, a test object gets it.

        Raises:
            StorageError: the store does not tell its time.
        """
        found = self._multipart_uploads.time_of_store(self._key("time"))
        return self._time_of_new_object() if found is None and writes else found

    def _time_of_new_object(self) -> float:
        """The time that the store gives a new object, which is removed again."""
        name = f"time-{uuid.uuid4().hex}.probe"
        self._put(name, b"1", "test", use_multipart=False)
        try:
            found = self.modified(name)
        finally:
            self.delete(name)
        if found is None:
            raise self._missing(name)
        return found

    def folders(self) -> list[str]:
        """Sorted names of the folders directly in this storage."""
        import obstore

        below = self._prefix or None
        found = self._ask_for("list", "", lambda: obstore.list_with_delimiter(self._store, below))
        prefixes = () if found is None else found["common_prefixes"]
        return sorted(one.rstrip("/").rpartition("/")[2] for one in prefixes)

    def siblings(self) -> list[str]:
        """Sorted names of the sibling folders, with this storage's own folder if it exists."""
        return ObjectStorage._of(self, self._prefix.rpartition("/")[0]).folders()

    def list(self, prefix: str = "") -> list[str]:
        """Sorted names of all files in the folder `prefix` and below."""
        import obstore

        below = self._key(prefix) if prefix else self._prefix
        start = len(self._prefix) + 1 if self._prefix else 0

        def request() -> builtins.list[str]:
            batches = obstore.list(self._store, below or None)
            return sorted(item["path"][start:] for batch in batches for item in batch)

        return self._ask_for("list", prefix, request) or []

    def delete(self, name: str) -> None:
        """Remove the object. A missing one is no error."""
        import obstore

        self._ask_for("delete", name, lambda: obstore.delete(self._store, self._key(name)))

    def uploads(self, parts_before: float) -> builtins.list[Upload]:
        """Multipart uploads below this prefix that did not complete, whose parts no listing shows.

        Azure has none: it drops the blocks of a dead upload after a week.

        Args:
            parts_before: Unix seconds. For each upload that began before this time, one request finds its
                bytes and the time of its last part.

        Raises:
            StorageError: the storage failed, or cannot list uploads.
        """
        if self._scheme == "gs":
            raise StorageError(
                f"cannot list multipart uploads of {self._bucket}: Google Cloud Storage lists them for HMAC "
                "keys only, through s3:// and its endpoint.",
                file=self.location,
            )
        if self._scheme not in _S3_SCHEMES:
            return []
        below = f"{self._prefix}/" if self._prefix else ""
        found = self._multipart_uploads.list(below, parts_before)
        return [replace(one, name=one.name.removeprefix(below)) for one in found]

    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an upload; one that ended is no error.

        Args:
            upload: from `uploads` of this storage.

        Raises:
            StorageError: the storage failed.
        """
        self._multipart_uploads.abort(replace(upload, name=self._key(upload.name)))

    @property
    def _scheme(self) -> str:
        return self._bucket.partition("://")[0]

    @property
    def _multipart_uploads(self) -> MultipartUploads:
        store: Any = self._store  # of S3, by its scheme
        return MultipartUploads(store, self._bucket, self._retry["retry_timeout"].total_seconds())

    def within(self, prefix: str) -> ObjectStorage:
        """The part of this storage below the folder `prefix`, as a storage."""
        return ObjectStorage._of(self, self._key(prefix))

    def sibling(self, folder: str) -> ObjectStorage:
        """The storage in the sibling folder of this name."""
        above = self._prefix.rpartition("/")[0]
        return ObjectStorage._of(
            self, f"{above}/{check_folder(folder, self._bucket)}" if above else check_folder(folder)
        )

    def close(self) -> None:
        """Does nothing: obstore closes idle connections."""

    def _key(self, name: str) -> str:
        check_name(name, self.location)
        return f"{self._prefix}/{name}" if self._prefix else name

    def _put(self, name: str, data: Any, doing: str, **how: Any) -> None:
        import obstore

        self._ask(doing, name, lambda: obstore.put(self._store, self._key(name), data, **how))

    def _ask(self, doing: str, name: str, request: Callable[[], _Result]) -> _Result:
        """The answer to a request. Raises the `StorageError` for any error of obstore."""
        silence = self._silence
        if silence is not None and silence.error is not None:
            raise StorageError(silence.error.message, **silence.error.details) from silence.error
        try:
            return request()
        except ShardproofError:
            raise
        except Exception as error:
            failed = self._error(error, doing, name)
            if silence is not None and failed.details.get("unanswered"):
                silence.error = failed
            raise failed from error

    def _ask_for(self, doing: str, name: str, request: Callable[[], _Result]) -> _Result | None:
        """As `_ask`; None if the store has no such object."""
        try:
            return self._ask(doing, name, request)
        except StorageError as error:
            if error.details.get("missing"):
                return None
            raise

    def _missing(self, name: str) -> StorageError:
        file = f"{self.location}/{name}"
        return StorageError(f"cannot read {file}: there is no such object", file=file, missing=True)

    def _error(self, error: Exception, doing: str, name: str) -> StorageError:
        """The `StorageError` for an error of obstore."""
        file = f"{self.location}/{name}" if name else self.location
        no_bucket = "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error)
        is_missing = isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"
        missing = is_missing and not no_bucket
        # A refused write may follow an earlier attempt that the store carries out later.
        is_refused = doing in _READS and _REFUSED.search(str(error)) is not None
        unanswered = type(error).__name__ == "GenericError" and not is_refused
        kind = "PermissionDeniedError" if "403 Forbidden" in str(error) else type(error).__name__
        advice = _ADVICE.get(kind, "")  # obstore has no class of its own for a refused listing
        if no_bucket:
            advice = "There is no such bucket: make it, or check the URL and the endpoint."
        elif unanswered:
            advice = (
                "Requests are repeated for at most "
                f"{self._retry['retry_timeout'].total_seconds():.0f} s (retry_config)."
            )
        text = f"cannot {doing} {file}: {_first_line(error)}. {advice}".rstrip()
        return request_error(text, file, missing=missing, unanswered=unanswered)


_PROBE_LOCK = lock()

_XML_PARTS = re.compile(r"<(Code|Message)>\s*([^<]*?)\s*</")
"""The parts of the XML answer of a store that say what it refused, in their order."""

_READS = frozenset({"read", "look at", "list"})
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d")
"""The part of an error that is the answer of a store which refuses the request for good."""

_OPEN_SETTINGS = frozenset({"region", "aws_region", "endpoint", "aws_endpoint", "bucket", "account_name"})
"""Settings that are no secrets."""
_CONFLICT_SECONDS = 0.5
"""Pause before a conditional PUT is repeated after a conflict."""

_ADVICE = {
    "NotFoundError": "There is no such object.",
    "AlreadyExistsError": "There is already an object of this name.",
    "PermissionDeniedError": "The credentials do not allow this: check the policy of the bucket.",
    "UnauthenticatedError": "The store does not accept the credentials: check key, secret and region.",
    "NotSupportedError": "The store does not support this request.",
}


def _endpoint(settings: Mapping[str, Any]) -> str:
    """The endpoint that the options or the environment name; empty for the store's own."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    found = (settings.get("endpoint"), settings.get("aws_endpoint_url_s3"), *map(os.environ.get, names))
    return str(next(filter(None, found), ""))


def _open(bucket: str, settings: dict[str, Any], endpoint: str, retry: dict[str, Any]) -> ObjectStore:
    """Opens a bucket with the credentials that the environment gives."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise ImportError("object stores need obstore: pip install 'shardproof[cloud]'") from error
    client: dict[str, Any] = {"user_agent": "shardproof", **(settings.pop("client_options", None) or {})}
    if endpoint.startswith("http://"):
        client.setdefault("allow_http", True)
    try:
        make: Any = from_url  # its types distinguish the stores
        store: ObjectStore = make(bucket, config=settings or None, client_options=client, retry_config=retry)
    except Exception as error:
        text = _first_line(error)
        for name, value in settings.items():
            if isinstance(value, str) and value and name not in _OPEN_SETTINGS:
                text = text.replace(value, "***")
        # The error of obstore may repeat a setting, so it is not the cause that Python prints.
        raise StorageError(f"cannot open {bucket}: {text}", file=bucket) from None
    return store


def _first_line(error: Exception) -> str:
    """The first line of an error. The code and the message of an XML document take its place.

    >>> body = "<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>No entry.</Message></Error>"
    >>> _first_line(Exception(f"Server returned 403 Forbidden: {body}"))
    'Server returned 403 Forbidden: AccessDenied: No entry'
    """
    head, found, body = str(error).partition("<?xml")
    if found and (parts := _XML_PARTS.findall(body)):
        text = f"{head.strip()} {': '.join(text.strip() for _, text in parts[:2])}"
        return without_credentials(text.strip()).rstrip(".")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_credentials(lines[0] if lines else type(error).__name__).rstrip(".")
