"""DCP checkpoints that are written here name only what torch 2.2 knows. torch 2.2 itself cannot run here."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardproof as sp
from tests.unit.formats.peers import Golden
from tests.unit.formats.writers import write


def names_in(pickled: bytes) -> set[str]:
    """Every name that a pickle imports, by a walk over its opcodes. Nothing is imported."""
    names, texts, memo = set[str](), list[str](), dict[Any, str]()
    last = ""
    for opcode, argument, _ in pickletools.genops(pickled):
        match opcode.name:
            case "GLOBAL":
                names.add(str(argument).replace(" ", "."))
            case "STACK_GLOBAL":
                names.add(".".join(texts[-2:]))
            case "MEMOIZE":
                memo[len(memo)] = last
                continue
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = last
                continue
            case "BINGET" | "LONG_BINGET":
                argument = memo[argument]
        last = argument if isinstance(argument, str) else ""
        if last:
            texts.append(last)
    return names


def names_of_entries(folder: Path) -> set[str]:
    """Every name that the archives in the ``.distcp`` files import."""
    names = set[str]()
    for index, place in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        data = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            assert len(pickles) == 1, index
            names |= names_in(archive.read(pickles[0]))
    moved = {"__builtin__.": "builtins.", "numpy.core.": "numpy._core."}  # numpy 1.26 knows both
    for old, new in moved.items():
        names = {name.replace(old, new) for name in names}
    return names


@pytest.mark.parametrize("name", ["dcp22_zoo_w4", "dcp22_objects_w2"])
def test_pickles_have_only_names_that_torch_2_2_uses(name: str, tmp_path: Path) -> None:
    """Checkpoints that torch 2.2 wrote show the names that it knows."""
    theirs = [Golden(other, tmp_path).checkpoint for other in ("dcp22_zoo_w4", "dcp22_objects_w2")]
    source = tmp_path / name / "ckpt"
    exclude = ["objs.np_str"] if "objects" in name else None  # an array of texts, which is no plain data
    sp.convert(source, tmp_path / "ours", to="dcp", max_file_bytes=300, exclude=exclude)
    known = set[str]().union(*(names_in((folder / ".metadata").read_bytes()) for folder in theirs))
    ours = names_in((tmp_path / "ours" / ".metadata").read_bytes())
    assert len(ours) > 8
    assert ours <= known
    assert names_of_entries(tmp_path / "ours") <= set[str]().union(*map(names_of_entries, theirs))


def test_the_metadata_has_the_fields_of_torch_2_2(tmp_path: Path) -> None:
    write("dcp", {"w": torch.ones(3)}, tmp_path, objects={"step": 3})
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    properties = metadata.state_dict_metadata["w"].properties
    assert (properties.dtype, properties.memory_format) == (torch.float32, torch.contiguous_format)
    assert vars(metadata).keys() == {
        "state_dict_metadata",
        "planner_data",
        "storage_data",
        "storage_meta",
    }
