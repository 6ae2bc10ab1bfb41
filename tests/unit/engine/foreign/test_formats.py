"""The format of a path. A save that did not finish is never taken for a checkpoint of another format."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.engine.foreign import NATIVE, READERS, foreign_of, format_of
from shardproof.errors import FormatError, NotCommittedError
from shardproof.formats import WRITERS


@pytest.mark.parametrize("lost", ["manifest", "manifest and index", "manifest and shards"])
def test_a_save_that_did_not_finish_is_no_checkpoint(lost: str, tmp_path: Path) -> None:
    sp.save(tmp_path / "step", {"w": torch.ones(3)})
    (tmp_path / "step" / "manifest.json").unlink()
    if "index" in lost:
        next((tmp_path / "step").glob("index-*")).unlink()
    if "shards" in lost:
        shutil.rmtree(tmp_path / "step" / "shards")
    assert format_of(foreign_of(tmp_path / "step")) == NATIVE
    with pytest.raises(NotCommittedError):
        sp.open(tmp_path / "step")
    with pytest.raises(NotCommittedError):
        sp.load(tmp_path / "step", {"w": torch.zeros(3)})


def test_the_error_for_an_empty_folder_says_how_to_name_a_format(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match="--format"):
        sp.open(tmp_path)


def test_a_file_of_no_known_format_and_an_unknown_format_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(FormatError, match="not a checkpoint of a known format"):
        sp.open(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="format is one of"):
        sp.open(tmp_path, format="parchment")


def test_every_format_that_is_written_is_recognized(tmp_path: Path) -> None:
    sp.save(tmp_path / "step", {"w": torch.ones(3)})
    own_reader = {"hf": "safetensors", "fsdp_dtensor": "dcp"}
    for to in WRITERS:
        sp.convert(tmp_path / "step", tmp_path / to, to=to)
        assert format_of(foreign_of(tmp_path / to)) == own_reader.get(to, to)
    assert set(WRITERS) - set(own_reader) <= {NATIVE, *READERS}
