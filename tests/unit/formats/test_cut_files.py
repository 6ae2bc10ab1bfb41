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
from shardproof.commands.cli.group import run as run_cli
from shardproof.engine.foreign import foreign_of
from shardproof.runs.maintenance import verify_any

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


def test_a_plain_value_that_lost_its_bytes_has_its_key_in_each_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor in a tuple is a part of a plain value."""
    path = tmp_path / "a.pt"
    made = [torch.full((99,), value) for value in (1.0, 2.0)]
    first, last = sorted(made, key=lambda tensor: str(tensor.untyped_storage()._cdata))  # their order in it
    torch.save({"w": first, "pair": (last, 1)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    assert whole.index(first.numpy().tobytes()) < whole.index(last.numpy().tobytes())
    path.write_bytes(whole[: whole.index(last.numpy().tobytes()) + 100])
    target = {"w": torch.zeros(99), "pair": None}
    with sp.open(path) as opened:
        assert torch.equal(opened["w"].read(), first)
        with pytest.raises(sp.StorageError, match=r"^'pair': .*a\.pt is too short") as caught:
            opened["pair"]
        assert caught.value.details["key"] == "pair"
    assert "It lacks bytes of pair. The other values can be read." in caplog.text
    with pytest.raises(sp.StorageError, match=r"It lacks bytes of pair\. .*exclude="):
        sp.load(path, target)
    with pytest.raises(sp.StorageError, match=r"'pair': .*a\.pt is too short"):
        sp.load(path, target, include=["w", "pair"])
    assert not target["w"].any(), "nothing was overwritten"
    sp.load(path, target, exclude=["pair"])
    assert torch.equal(target["w"], first)


@pytest.mark.parametrize("write", [safetensors, legacy, hugging_face])
def test_verify_names_a_cut_file_once(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    checkpoint = write(tmp_path)
    file, lost = cut(checkpoint)
    (fault,) = verify_any(foreign_of(checkpoint)).faults
    assert file.name in fault.message and fault.details["keys"] == sorted(lost)


def test_verify_names_damage_to_an_object_beside_a_cut_file(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    torch.save({"pair": (torch.ones(99), 1)}, tmp_path / "optimizer.bin")
    torch.save({}, tmp_path / "random_states_0.pkl")  # the mark of Accelerate
    for name, change in (("model.safetensors", -1), ("optimizer.bin", 0)):
        data = bytearray((tmp_path / name).read_bytes())
        data[data.index(torch.ones(99).numpy().tobytes())] ^= 1
        (tmp_path / name).write_bytes(data[:change] if change else data)
    cut_file, damaged = verify_any(foreign_of(tmp_path)).faults
    assert isinstance(cut_file, sp.StorageError) and "model.safetensors has" in cut_file.message
    assert isinstance(damaged, sp.CorruptChunkError) and "optimizer.bin" in damaged.message
