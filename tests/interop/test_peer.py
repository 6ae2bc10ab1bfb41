"""`run_peer` returns the values that a script read, and ends processes that do not end by themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.interop import peer
from tests.interop.peer import PeerFailed, PeerTimedOut, assert_same_tensors, run_peer


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for `tests/interop`, with scripts of the test."""
    (tmp_path / "peers").mkdir()
    monkeypatch.setattr(peer, "FOLDER", tmp_path)
    return tmp_path / "peers"


def test_error_has_the_output_of_each_rank_and_ends_the_others(scripts: Path, tmp_path: Path) -> None:
    (scripts / "fails.py").write_text(
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit('the disk is full')\n"
        "print('rank 0 waits', flush=True)\n"
        "signal.pause()\n"
    )
    with pytest.raises(PeerFailed, match=r"(?s)exit code 1.*rank 1\n.*the disk is full"):
        run_peer("zarr", "fails.py", nproc=2)


def test_timeout_ends_the_children_of_the_script(scripts: Path, tmp_path: Path) -> None:
    """The script's child holds a pipe open: its end shows that the child has ended."""
    (scripts / "hangs.py").write_text(
        "import os, signal, sys\n"
        "pipe = os.open(sys.argv[1], os.O_WRONLY)\n"
        "os.fork()\n"
        "print('waits', flush=True)\n"
        "signal.pause()\n"
    )
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(PeerTimedOut, match=r"(?s)after 3 s.*waits"):
            run_peer("zarr", "hangs.py", tmp_path / "pipe", timeout=3)
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_script_without_a_result(scripts: Path) -> None:
    (scripts / "silent.py").write_text("print('done')\n")
    with pytest.raises(PeerFailed, match=r"(?s)wrote no result.*done"):
        run_peer("zarr", "silent.py")


def test_missing_environment_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="make test-interop"):
        run_peer("none", "read_zarr.py")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "w: missing"),
        ({"w": torch.zeros(2), "v": torch.zeros(1)}, "v: unexpected"),
        (
            {"w": torch.zeros(2, dtype=torch.int32)},
            r"w: expected torch.float32 \[2\], found torch.int32 \[2\]",
        ),
        ({"w": torch.zeros(1, 2)}, r"found torch.float32 \[1, 2\]"),
        ({"w": torch.tensor([0.0, -0.0])}, "w: 1 of 8 bytes differ"),
    ],
)
def test_tensors_that_differ(found: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_tensors(found, {"w": torch.zeros(2)})
