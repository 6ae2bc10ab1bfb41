"""A store that refuses a request: the error has the code and the message of its answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import shardproof as sp
from shardproof.storage import ObjectStorage

BODY = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>AccessDenied</Code><Message>User may not read.</Message><Resource>/bucket</Resource></Error>"""


class Refusal(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002 the name of the base class
        """Logs nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A server that refuses each request as S3 does. It replaces a bucket with another policy."""
    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_error_has_the_code_and_the_message_of_the_store(endpoint: str) -> None:
    options = {"endpoint": endpoint, "region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
    with pytest.raises(sp.StorageError) as caught:
        ObjectStorage("s3://bucket/run", options).read("manifest.json")
    assert "403 Forbidden: AccessDenied: User may not read." in caught.value.message
    assert "<" not in caught.value.message
