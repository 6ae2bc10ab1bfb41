"""Multipart uploads of an S3 bucket that did not complete: lists them and aborts them.

Note "Signed URLs": obstore has no such requests, but signs URLs with the credentials that it finds. It signs
the URL of each request for this module, which sends the request with the standard library. obstore takes the
name of an object and no query. So the query is part of the endpoint of a second store, and ends with "#". The
name of the object becomes the fragment of the URL, which neither the signature nor the request contains.
Before this module sends a URL, it compares host, path and query with the intended ones.
"""

from __future__ import annotations

import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit
from xml.etree import ElementTree

from shardproof.errors import StorageError

if TYPE_CHECKING:
    from obstore.store import S3Store

_PAGE = 1000
"""Maximum number of entries in an answer of S3."""
_EXPIRES = timedelta(minutes=5)
_REQUEST_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0
"""Seconds between two attempts of a request."""
_RETRIED = (429, 500, 502, 503, 504)

_NEEDS = {
    "list": "s3:ListBucketMultipartUploads",
    "look at": "s3:ListMultipartUploadParts",
    "abort": "s3:AbortMultipartUpload",
}
"""The action that a policy must allow, by what the request does."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that did not complete."""

    name: str
    """The object that it would have made, within the storage."""
    id: str
    bytes: int | None
    """Bytes of its parts; None if they were not listed."""
    modified: float
    """Time of the last part that arrived, or of the start of the upload without one, Unix seconds."""


class MultipartUploads:
    """The multipart uploads of a bucket.

    Requests are repeated for `retry` seconds after a failure of the server or the connection. An answer has
    at most `page` uploads or parts.
    """

    def __init__(self, store: S3Store, location: str, retry: float, page: int = _PAGE) -> None:
        self._store = store
        self._location = location
        self._retry = retry
        self._page = page
        self._client = {name: _text(value) for name, value in (store.client_options or {}).items()}

    def list(self, prefix: str, parts_before: float) -> list[Upload]:
        """The uploads of objects whose names begin with a prefix.

        It lists the parts of those uploads that began before `parts_before`, Unix seconds. An upload that
        ended meanwhile is left out.

        Raises:
            StorageError: the store refuses or fails.
        """
        found = []
        which = {"max-uploads": str(self._page), "prefix": prefix, "uploads": ""}
        try:
            for page in self._pages("list", "", which, ("key-marker", "upload-id-marker")):
                for entry in page.iterfind("{*}Upload"):
                    name, number = _field(entry, "Key"), _field(entry, "UploadId")
                    begun = Upload(name, number, None, _time(_field(entry, "Initiated")))
                    upload = self._with_parts(begun) if begun.modified < parts_before else begun
                    if upload is not None:
                        found.append(upload)
        except (ElementTree.ParseError, ValueError) as error:
            raise self._failed("list", "", f"the answer is not valid: {error}") from error
        return found

    def time_of_store(self, key: str) -> float | None:
        """The time in the header of the store's answer to a request for an object, which need not exist.

        Returns:
            Unix seconds; None if obstore cannot sign the request, or if no answer with a time comes.
        """
        import obstore

        try:
            url = obstore.sign(self._store, "HEAD", key, _EXPIRES)
        except Exception:
            return None
        request = urllib.request.Request(url, method="HEAD", headers=self._headers())
        try:
            with self._opener(url).open(request, timeout=_REQUEST_SECONDS) as answer:
                date = answer.headers["Date"]
        except urllib.error.HTTPError as error:
            with error:
                date = error.headers["Date"]
        except (OSError, http.client.HTTPException):
            return None
        try:
            return parsedate_to_datetime(date).timestamp() if date else None
        except ValueError:
            return None

    def abort(self, upload: Upload) -> None:
        """Removes the parts of an upload. An upload that ended is no error."""
        self._request("abort", "DELETE", upload.name, {"uploadId": upload.id})

    def _with_parts(self, upload: Upload) -> Upload | None:
        """The upload with its bytes; None if it ended."""
        size, modified, are_all = 0, upload.modified, False
        which = {"max-parts": str(self._page), "uploadId": upload.id}
        for page in self._pages("look at", upload.name, which, ("part-number-marker",)):
            for part in page.iterfind("{*}Part"):
                size += int(_field(part, "Size"))
                modified = max(modified, _time(_field(part, "LastModified")))
            are_all = not _is_truncated(page)
        return Upload(upload.name, upload.id, size, modified) if are_all else None

    def _pages(
        self, doing: str, key: str, query: Mapping[str, str], markers: tuple[str, ...]
    ) -> Iterator[ElementTree.Element]:
        """The pages of a listing; none if the upload ended meanwhile."""
        after: dict[str, str] = {}
        while True:
            body = self._request(doing, "GET", key, {**query, **after})
            if body is None:
                return
            page = ElementTree.fromstring(body)
            yield page
            if not _is_truncated(page):
                return
            # "key-marker" of the next page is the field NextKeyMarker of this one
            fields = {name: page.findtext("{*}Next" + name.title().replace("-", "")) for name in markers}
            following = {name: value for name, value in fields.items() if value}
            if following == after:
                raise ValueError("the store repeats a page")
            after = following

    def _request(self, doing: str, method: str, key: str, query: Mapping[str, str]) -> bytes | None:
        """The body of the answer; None if there is no such upload."""
        ends = time.monotonic() + self._retry
        pause = _FIRST_PAUSE
        while True:
            try:
                return self._send(method, self._signed(doing, method, key, query))
            except urllib.error.HTTPError as error:
                with error:
                    code, reason = _refusal(error)
                if error.code == 404 and code == "NoSuchUpload":
                    return None
                is_passing = error.code in _RETRIED
                reason = f"{error.code} {reason}"
                if error.code == 403:
                    reason = f"{reason.rstrip('.')}. The credentials must allow {_NEEDS[doing]}"
                cause: Exception = error
            except (OSError, http.client.HTTPException) as error:
                reason, cause = str(error) or type(error).__name__, error
                is_passing = not isinstance(getattr(error, "reason", error), ssl.SSLError)
            if not is_passing:
                raise self._failed(doing, key, reason) from cause
            if time.monotonic() + pause > ends:
                advice = f"Requests are repeated for at most {self._retry:.0f} s (retry_config)"
                raise self._failed(doing, key, f"{reason.rstrip('.')}. {advice}") from cause
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _signed(self, doing: str, method: Any, key: str, query: Mapping[str, str]) -> str:
        """The signed URL of a request; see note "Signed URLs"."""
        import obstore
        from obstore.store import S3Store

        try:
            object_url = obstore.sign(self._store, method, "x", _EXPIRES)
            bucket_url = object_url.partition("?")[0].removesuffix("/x")
            url = f"{bucket_url}/{quote(key)}" if key else bucket_url
            config: dict[str, Any] = {
                **self._store.config,
                "virtual_hosted_style_request": True,  # obstore then adds no bucket to the endpoint
                "endpoint": f"{url}?{urlencode(query, quote_via=quote, safe='')}#",
            }
            if os.environ.get("AWS_ENDPOINT_URL_S3"):  # obstore prefers it to "endpoint"
                config["aws_endpoint_url_s3"] = config["endpoint"]
            store = S3Store(
                config=config,  # type: ignore[arg-type]
                client_options=self._store.client_options,
                retry_config=self._store.retry_config,
                credential_provider=self._store.credential_provider,
            )
            signed = obstore.sign(store, method, "x", _EXPIRES).partition("#")[0]
        except Exception as error:
            raise self._failed(doing, key, f"obstore cannot sign the request: {error}") from error
        meant, made = urlsplit(url), urlsplit(signed)
        fields = parse_qsl(made.query, keep_blank_values=True)
        own, added = fields[: len(query)], fields[len(query) :]
        if (
            (made.scheme, made.netloc, made.path) != (meant.scheme, meant.netloc, meant.path or "/")
            or own != list(query.items())
            or not all(name.lower().startswith("x-amz-") for name, _ in added)
        ):
            raise self._failed(doing, key, "this version of obstore signs another request")
        return signed

    def _send(self, method: str, url: str) -> bytes:
        ends = time.monotonic() + _REQUEST_SECONDS
        request = urllib.request.Request(url, method=method, headers=self._headers())
        with self._opener(url).open(request, timeout=_REQUEST_SECONDS) as answer:
            body = bytearray()
            while piece := answer.read1(1 << 16):
                body += piece
                if time.monotonic() > ends:
                    raise TimeoutError(f"the answer takes longer than {_REQUEST_SECONDS:.0f} s")
        return bytes(body)

    def _headers(self) -> dict[str, str]:
        headers = (self._store.client_options or {}).get("default_headers") or {}
        return {
            "User-Agent": self._client.get("user_agent", "shardproof"),
            **{name: _text(value) for name, value in headers.items()},
        }

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        """Sends requests with the proxy and the certificates of the store's client."""
        context = ssl.create_default_context()
        if "root_certificate" in self._client:
            context.load_verify_locations(cadata=self._client["root_certificate"])
        if self._client.get("allow_invalid_certificates", "").lower() == "true":
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
        if "proxy_url" in self._client:
            host = urlsplit(url).hostname or ""
            excludes = self._client.get("proxy_excludes", "").split(",")
            is_excluded = any(f".{host}".endswith(f".{one.strip(' .')}") for one in excludes if one)
            proxies = {} if is_excluded else dict.fromkeys(("http", "https"), self._client["proxy_url"])
            handlers.append(urllib.request.ProxyHandler(proxies))
        return urllib.request.build_opener(*handlers)

    def _failed(self, doing: str, key: str, reason: str) -> StorageError:
        what = f"the upload of {self._location}/{key}" if key else f"multipart uploads of {self._location}"
        return StorageError(f"cannot {doing} {what}: {reason.rstrip('.')}.", file=self._location)


def _refusal(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Code and text of a refused request."""
    try:
        answer = ElementTree.fromstring(error.read())
    except (ElementTree.ParseError, OSError, http.client.HTTPException):
        return "", error.reason
    code = answer.findtext("{*}Code") or ""
    return code, f"{code}: {answer.findtext('{*}Message') or error.reason}"


def _is_truncated(page: ElementTree.Element) -> bool:
    """True if another page follows."""
    return page.findtext("{*}IsTruncated") == "true"


def _field(entry: ElementTree.Element, name: str) -> str:
    """The text of a field.

    Raises:
        ValueError: it is missing or empty.
    """
    text = entry.findtext(f"{{*}}{name}")
    if not text:
        raise ValueError(f"it has no {name}")
    return text


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
