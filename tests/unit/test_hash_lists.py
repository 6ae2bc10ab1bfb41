"""The lists with hashes: which hashes they have, and when they are not written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from packaging.version import Version

from tools import ci_requirements
from tools.ci_requirements import Chosen

FILES = {
    "torch-2.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": "1a",
    "torch-2.0+cpu-cp312-cp312-manylinux_2_28_aarch64.whl": "2b",
    "torch-2.0+cpu-cp311-cp311-win_amd64.whl": "3c",
    "torch-1.9+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": "4d",
}
LINKS = [f'<a href="/whl/{name.replace("+", "%2B")}#sha256={sha256}">a</a>' for name, sha256 in FILES.items()]


class Index(BaseHTTPRequestHandler):
    """An index of the files of torch: as JSON below ``/json``, as HTML elsewhere."""

    def do_GET(self) -> None:
        files = FILES if self.path.endswith("/torch/") else {}
        if self.path.startswith("/json/"):
            kind = "application/vnd.pypi.simple.v1+json"
            listed = [{"filename": name, "hashes": {"sha256": sha256}} for name, sha256 in files.items()]
            body = json.dumps({"files": listed})
        else:
            kind, body = "text/html; charset=utf-8", f"<html><body>{' '.join(LINKS)}</body></html>"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_arguments: object) -> None:
        """Prints nothing."""


@contextmanager
def served() -> Iterator[str]:
    """The URL of an `Index`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(60.0)


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the root of the repository."""
    for name in ("MAIN", "CPU", "CUDA", "PAGE"):
        monkeypatch.setattr(ci_requirements, name, tmp_path / name)
    return tmp_path


def write_lists(monkeypatch: pytest.MonkeyPatch, torch: str, *arguments: str) -> None:
    """Runs the tool, with a stand-in for pip that finds this version of torch, six, and playwright."""

    def found(*wanted: str, index: str | None = None) -> dict[str, Chosen]:
        versions = {"torch": "2.0", "nccl": "3.0"} if index else {"torch": torch, "six": "1.0"}
        if wanted == ("playwright",):
            versions = {"playwright": "4.0", "six": "1.0"}
        return {name: Chosen(name, Version(version), "0f") for name, version in versions.items()}

    monkeypatch.setattr(ci_requirements, "chosen", found)
    monkeypatch.setattr(sys, "argv", ["ci_requirements", *arguments])
    ci_requirements.main()


@pytest.mark.parametrize("kind", ["json", "html"])
def test_the_build_without_cuda_has_every_hash_for_linux(
    kind: str, lists: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as url:
        write_lists(monkeypatch, "2.0+cpu", "--index", f"{url}/json", "--cpu-index", f"{url}/{kind}")
        assert (lists / "CPU").read_text().splitlines()[1:] == [
            "torch==2.0+cpu \\",
            *(f"    --hash=sha256:{sha256} \\" for sha256 in ("0f", "1a")),
            "    --hash=sha256:2b",
        ]
        write_lists(monkeypatch, "2.0+cpu", "--index", f"{url}/json")
    assert (lists / "CPU").read_text().splitlines()[1:] == ["torch==2.0+cpu \\", "    --hash=sha256:0f"]


def test_each_package_is_in_one_list(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as url:
        write_lists(monkeypatch, "2.0+cpu", "--index", f"{url}/json")
    found = {path.name: re.findall(r"^(\w+)==", path.read_text(), re.M) for path in lists.iterdir()}
    assert found == {"MAIN": ["six"], "CPU": ["torch"], "CUDA": ["nccl", "torch"], "PAGE": ["playwright"]}


def test_without_a_build_without_cuda_nothing_is_written(
    lists: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as url:
        for torch, error in (
            ("2.0", "pip finds no build of torch without CUDA, but torch==2.0"),
            ("2.0+cu126", "pip finds no build of torch without CUDA"),
            ("2.1+cpu", r"/html lists no hash of a file of torch==2\.1\+cpu"),
        ):
            with pytest.raises(SystemExit, match=error):
                write_lists(monkeypatch, torch, "--index", f"{url}/json", "--cpu-index", f"{url}/html")
    assert not list(lists.iterdir())
