"""Models of transformers on the training parts: saved on three ranks, and continued on two."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.peer import run_peer

pytestmark = [pytest.mark.interop, pytest.mark.processes, pytest.mark.timeout(700)]

PARTS = ["fsdp2", "fsdp", "distributed", "hybrid"]
MODELS = ["llama", "mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt2", "t5", "vit", "mamba"]
BOUND = 1e-5
"""Two ranks add the gradients of the samples in another order than three do. Each sum is rounded to float32,
6e-8 of its value. Epsilon bounds what a step of AdamW makes of that."""


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, list[float]], dict[str, list[float]]]:
    """The checkpoints, and the losses without a restart and with one."""
    folder = tmp_path_factory.mktemp("zoo")
    whole = run_peer("torch", "train_zoo.py", "save", folder, *PARTS, "--", *MODELS, nproc=3, timeout=300)
    continued = run_peer("torch", "train_zoo.py", "load", folder, *PARTS, "--", *MODELS, nproc=2, timeout=300)
    return folder, whole.facts, continued.facts


@pytest.mark.parametrize("part", PARTS)
def test_models_saved_on_three_ranks_continue_on_two(
    part: str, trained: tuple[Path, dict[str, list[float]], dict[str, list[float]]]
) -> None:
    """The loaded state has the saved bits. Later steps are those without a restart, and of torch's FSDP2."""
    folder, whole, continued = trained
    for model in MODELS:
        run = folder / part / model
        assert_same_checkpoints(run / "loaded", run / "saved")
        losses = continued[f"{part}.{model}"]
        assert losses == pytest.approx(whole[f"{part}.{model}"], rel=BOUND, abs=0), model
        assert losses == pytest.approx(whole[f"fsdp2.{model}"], rel=BOUND, abs=0), model
        assert_close(run / "continued", run / "whole")


def assert_close(found: Path, expected: Path) -> None:
    """Fails unless no element of a tensor differs by more than the bound."""
    with sp.open(found) as ours, sp.open(expected) as theirs:
        assert list(ours) == list(theirs)
        for record in ours.tensors:
            one, other = (checkpoint[record.key].read() for checkpoint in (ours, theirs))
            assert one.shape == other.shape
            difference = (one.double() - other.double()).abs().max()
            assert difference <= BOUND, f"{found}, {record.key}: {difference}"
