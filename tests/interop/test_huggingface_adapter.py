"""`shardproof.frameworks.huggingface` with released transformers, on real ranks, bit for bit."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardproof as sp
from tests.interop.peer import FOLDER, PeerFailed, PeerResult, assert_same_tensors, python_of, run_peer

EXAMPLE = FOLDER.parents[1] / "examples" / "hf_meta.py"
PAGE = FOLDER.parents[1] / "docs" / "frameworks" / "huggingface.md"


def tensors_of(read: PeerResult, kind: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(f"{kind}."): value
        for name, value in read.tensors.items()
        if name.startswith(f"{kind}.")
    }


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


CASES = [
    ("llama", "fsdp", 2, ()),
    ("llama", "tensor", 2, ()),
    ("llama_tied", "fsdp", 2, ()),
    ("llama_tied", "tensor", 2, ()),
    ("llama_tied", "both", 4, ()),
    ("mixtral", "fsdp", 2, ()),
    ("mixtral", "tensor", 2, ()),
    ("qwen2", "fsdp", 2, ("float32",)),
    ("qwen3_moe", "fsdp", 2, ()),
    ("gpt2", "whole", 1, ()),
]


@pytest.mark.parametrize(("family", "way", "ranks", "dtype"), CASES)
def test_files_to_sharded_model_to_files(
    family: str, way: str, ranks: int, dtype: tuple[str, ...], tmp_path: Path
) -> None:
    """The loaded model equals that of `from_pretrained`, which opens the export after a step."""
    written = run_peer("torch", "write_hf.py", tmp_path / "model", family, "20KB")
    read = run_peer(
        "torch",
        "huggingface_adapter.py",
        way,
        tmp_path / "model",
        tmp_path / "export",
        *dtype,
        nproc=ranks,
        timeout=200,
    )
    assert_same_tensors(tensors_of(read, "loaded"), tensors_of(read, "reference"))
    assert_same_tensors(tensors_of(read, "opened"), tensors_of(read, "trained"))
    assert any(
        not torch.equal(value, tensors_of(read, "loaded")[name])
        for name, value in tensors_of(read, "trained").items()
    )
    assert read.facts["info"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    assert read.facts["tied"] == (family in ("llama_tied", "gpt2"))
    assert stored(tmp_path / "export").keys() == written.tensors.keys()  # experts one by one, ties once
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1
    assert not (tmp_path / "export.exporting").exists()


def test_a_rank_reads_and_allocates_its_share(tmp_path: Path) -> None:
    written = run_peer("torch", "write_hf.py", tmp_path / "model", "mixtral", "20KB")
    read = run_peer(
        "torch", "huggingface_adapter.py", "fsdp", tmp_path / "model", tmp_path / "export", nproc=2
    )
    total = sum(tensor.numel() * tensor.element_size() for tensor in written.tensors.values())
    assert sum(read.facts["needed"]) == total
    for needed, nbytes, held in zip(*(read.facts[name] for name in ("needed", "bytes", "held")), strict=True):
        assert needed < 0.51 * total and held < 0.51 * total
        assert nbytes < 0.6 * total  # with gaps that are shorter than a read


def test_keys_that_do_not_fit_are_named_on_every_rank(tmp_path: Path) -> None:
    for family in ("llama", "mixtral"):
        run_peer("torch", "write_hf.py", tmp_path / family, family)
    read = run_peer(
        "torch",
        "huggingface_refusals.py",
        tmp_path / "llama",
        tmp_path / "mixtral",
        tmp_path / "edited",
        nproc=2,
    )
    texts = {
        "missing": ("KeyMismatchError", "not stored (1):\n    model.norm.weight"),
        "unexpected": ("KeyMismatchError", "exclude= ignores them"),
        "expert": ("StructureError", "model.layers.0.mlp.experts.gate_up_proj"),
        "tied twice": ("KeyMismatchError", "one tensor in the model"),
        "broken tie": ("StructureError", "model.tie_weights()"),
        "buffer": ("StructureError", "model.scale"),
        "one rank": ("NotCommittedError", "rank 1"),
        "no model": ("TypeError", "PreTrainedModel"),
        "existing": ("AlreadyCommittedError", "exists"),
    }
    embedding = stored(tmp_path / "llama")["model.embed_tokens.weight"]
    assert_same_tensors(read.tensors, {"tied": embedding})  # exclude= chose it
    for case, (kind, text) in texts.items():
        assert read.facts[case][0] == kind and text in read.facts[case][1], (case, read.facts[case])


def test_a_killed_export_leaves_no_folder_and_the_next_one_removes_its_files(tmp_path: Path) -> None:
    run_peer("torch", "write_hf.py", tmp_path / "model", "mixtral")
    args = ("huggingface_adapter.py", "whole", tmp_path / "model", tmp_path / "export")
    with pytest.raises(PeerFailed, match="exit code -9"):
        run_peer("torch", *args, "kill")
    assert not (tmp_path / "export").exists() and (tmp_path / "export.exporting").exists()
    read = run_peer("torch", *args)
    assert_same_tensors(tensors_of(read, "opened"), tensors_of(read, "trained"))
    assert not (tmp_path / "export.exporting").exists()


def run_example(source: Path, run: Path, steps: int, ranks: int, until: str | None = None) -> str:
    """Runs the example, and kills every rank once rank 0 has written `until`. Returns what rank 0 wrote."""
    command = [str(python_of("torch")), str(EXAMPLE), str(source), str(run), str(steps)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "PYTHONPATH": str(Path(sp.__file__).resolve().parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            env=inherited | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    lines = []
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:  # the time limit of pytest ends the wait
            lines.append(line)
            if until is not None and until in line:
                break
        else:
            assert [process.wait(60) for process in processes] == [0] * ranks, "".join(lines)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return "".join(lines)


def test_the_example_is_killed_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """The export equals that of an uninterrupted run."""
    example = EXAMPLE.read_text().splitlines()
    assert len(example) <= 40
    shown = PAGE.read_text().split("```diff\n")[1].split("```")[0].splitlines()
    assert {line[1:] for line in shown if line[0] in "+ " and line != " ..."} <= set(example)
    run_peer("torch", "write_hf.py", tmp_path / "model", "llama")
    killed = run_example(tmp_path / "model", tmp_path / "killed", 4, ranks=2, until="step 2")
    assert "step 1, resumed from 0" in killed and not (tmp_path / "killed-model").exists()
    resumed = run_example(tmp_path / "model", tmp_path / "killed", 4, ranks=1)
    assert re.search(r"step 4, resumed from [23]", resumed)
    run_example(tmp_path / "model", tmp_path / "whole", 4, ranks=1)
    assert_same_tensors(stored(tmp_path / "killed-model"), stored(tmp_path / "whole-model"))
