"""`ObjectStorage` against Azurite, the Azure emulator of Microsoft.

Azurite is a package of npm, which no target installs. The tests find it in
``tests/object_store/node_modules`` (``npm install --prefix tests/object_store azurite``), or where
``SHARDPROOF_AZURITE`` names the program ``azurite-blob``. They are skipped where it is not installed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.storage import ObjectStorage
from shardproof.storage.conformance import StorageConformance

pytestmark = [pytest.mark.processes, pytest.mark.slow]

_PROGRAM = Path(__file__).parent / "node_modules" / ".bin" / "azurite-blob"
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and the key of every Azurite, which its documentation gives."""
_READY_SECONDS = 60.0


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a server with the container ``tests``."""
    program = os.environ.get("SHARDPROOF_AZURITE", str(_PROGRAM))
    if shutil.which(program) is None:
        pytest.skip("Azurite is not installed: npm install --prefix tests/object_store azurite")
    folder = tmp_path_factory.mktemp("azurite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--skipApiVersionCheck", "--disableTelemetry"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _make_container(endpoint, "tests", process)
        yield endpoint
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def _make_container(endpoint: str, name: str, process: subprocess.Popen[bytes]) -> None:
    """Makes a container with a signed request, as soon as the server answers. obstore cannot make one."""
    ends = time.monotonic() + _READY_SECONDS
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    signed = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"])
    digest = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{endpoint}/{_ACCOUNT}/{name}?restype=container", headers=headers, method="PUT"
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except urllib.error.HTTPError:
            raise
        except OSError:
            if process.poll() is not None or time.monotonic() > ends:
                raise
            time.sleep(0.1)


@pytest.fixture
def options(azurite: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", azurite)
    return {"use_emulator": "true", "client_options": {"allow_http": True}}


class TestAzure(StorageConformance):
    @pytest.fixture
    def storage(self, options: dict[str, Any]) -> ObjectStorage:
        return ObjectStorage(f"az://tests/{uuid.uuid4().hex}", options)


def test_a_run_in_azure_is_saved_and_restored(options: dict[str, Any]) -> None:
    url = f"az://tests/{uuid.uuid4().hex}"
    checkpointer = sp.Checkpointer(url, keep=sp.KeepLatest(2), storage_options=options)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.full((10_000_000,), float(step))}).result()
    target = {"w": torch.zeros(10_000_000)}
    assert sp.Checkpointer(url, storage_options=options).restore(target) == 3
    assert target["w"].unique().tolist() == [3.0]
    with pytest.raises(sp.AlreadyCommittedError):
        sp.save(f"{url}/step-00000003", {"n": 1}, storage_options=options)
