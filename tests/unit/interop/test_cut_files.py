"""Files that were cut: the tensors before the cut are read, and the others are errors with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardproof as sp
from shardproof.cli.group import run as run_cli
from shardproof.interop import foreign_of
from shardproof.maintenance import verify_any

STATE = {"first": torch.arange(3000.0), "second": torch.arange(3000.0) + 0.5, "third": torch.ones(3000)}


def safetensors(path: Path) -> Path:
    save_file(STATE, path / "a.safetensors")
    return path / "a.safetensors"


def legacy(path: Path) -> Path:
    torch.save(STATE, path / "a.pt", _use_new_zipfile_serialization=False)
    return path / "a.pt"


def hugging_face(path: Path) -> Path:
    sp.save(path / "source", STATE)
    sp.convert(path / "source", path / "model", to="hf", max_file_bytes=24_500)
    return path / "model"


def distributed(path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def cut(checkpoint: Path) -> tuple[Path, list[str]]:
    """Cuts the file of the second tensor, in the order of files, in the middle of its bytes.

    Returns:
        The file, and the tensors that are lost.
    """
    with sp.open(checkpoint) as opened:
        places = {key: opened.boxes[opened.row(key)] for key in STATE}
    order = sorted(STATE, key=lambda key: (places[key].file, places[key].start))
    key = order[1]
    data = STATE[key].numpy().tobytes()
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*"))
    file = next(one for one in files if one.is_file() and data in one.read_bytes())
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index(data) + len(data) // 2])
    return file, [key for key in order[1:] if places[key].file == places[order[1]].file]


WRITERS = [safetensors, legacy, hugging_face, distributed]


@pytest.mark.parametrize("write", WRITERS)
def test_whole_tensors_of_a_cut_file_are_read_and_the_others_name_file_and_remedy(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    checkpoint = write(tmp_path)
    file, lost = cut(checkpoint)
    whole = [key for key in STATE if key not in lost]
    assert whole and lost
    with sp.open(checkpoint) as opened:
        for key in whole:
            assert torch.equal(opened[key].read(), STATE[key])
        for key in lost:
            with pytest.raises(sp.ShardproofError, match=re.escape(file.name)) as caught:
                opened[key].read()
            assert "from a copy" in caught.value.message or "again" in caught.value.message
    for options in ({"include": whole}, {"exclude": lost}):
        target = {key: torch.zeros(3000) for key in STATE}
        sp.load(checkpoint, target, **options)
        assert all(torch.equal(target[key], STATE[key]) for key in whole)
        assert all(not target[key].any() for key in lost)
    target = {key: torch.zeros(3000) for key in STATE}
    with pytest.raises(sp.ShardproofError, match=re.escape(file.name)):
        sp.load(checkpoint, target)
    assert not verify_any(foreign_of(checkpoint)).ok


@pytest.mark.parametrize("write", [safetensors, legacy, hugging_face])
def test_the_error_of_a_cut_file_lists_its_lost_tensors_before_anything_is_read(
    tmp_path: Path, write: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice, run as the message names it, reads the rest, in Python and as a command."""
    checkpoint = write(tmp_path)
    file, lost = cut(checkpoint)
    listed = ", ".join(sorted(lost))
    target = {key: torch.zeros(3000) for key in STATE}
    with pytest.raises(sp.StorageError, match=rf"It lacks bytes of {listed}\. .*exclude=") as caught:
        sp.load(checkpoint, target)
    assert file.name in caught.value.message and not any(value.any() for value in target.values())
    assert run_cli(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr()
    assert f"It lacks bytes of {listed}." in " ".join((shown.out + shown.err).split())
    assert run_cli(["convert", str(checkpoint), str(tmp_path / "failed"), "--to", "dcp"]) != 0
    skipped = [word for key in lost for word in ("--exclude", key)]
    assert run_cli(["convert", str(checkpoint), str(tmp_path / "new"), "--to", "dcp", *skipped]) == 0
    with sp.open(tmp_path / "new") as rest:
        assert set(rest.keys()) == set(STATE) - set(lost)


def test_a_missing_file_of_other_keys_does_not_stop_a_load(tmp_path: Path) -> None:
    sp.save(tmp_path / "source", {"other": torch.ones(2), "lost": torch.ones(3)})
    checkpoint = tmp_path / "zarr"
    sp.convert(tmp_path / "source", checkpoint, to="zarr")
    with sp.open(checkpoint) as opened:
        (checkpoint / opened.boxes[opened.row("lost")].file).unlink()
    target = {"other": torch.zeros(2), "lost": torch.zeros(3)}
    with pytest.raises(sp.ShardproofError, match="lost"):
        sp.load(checkpoint, target)
    sp.load(checkpoint, target, include="other")
    assert torch.equal(target["other"], torch.ones(2)) and not target["lost"].any()
