"""Checkpoints of the hybrid optimizer: other fractions, a plain optimizer, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.unit.optim.hybrid_samples import equal, hybrid, model_of, plain, train, values

KINDS = ["adamw", "momentum", "lion"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_it_goes_on_at_any_fraction_and_without(tmp_path: Path, kind: str, steps: int) -> None:
    model = model_of()
    source = hybrid(model, kind, 0.5)
    train(model, source, 0, steps)
    sp.save(tmp_path / "half", {"model": model, "optimizer": source})
    for place, fraction in (("none", 0.0), ("all", 1.0), ("plain", None)):
        other = model_of(seed=1)
        target = plain(other, kind) if fraction is None else hybrid(other, kind, fraction)
        train(other, target, 50, 51)
        sp.load(tmp_path / "half", {"model": other, "optimizer": target})
        sp.save(tmp_path / place, {"model": other, "optimizer": target})
        train(other, target, steps, steps + 2)
        back = model_of(seed=2)
        again = hybrid(back, kind, 0.5)
        sp.load(tmp_path / place, {"model": back, "optimizer": again})
        train(back, again, steps, steps + 2)
        reference = model_of()
        train(reference, plain(reference, kind), 0, steps + 2)
        assert equal(values(other), values(reference))
        assert equal(values(back), values(reference))


@pytest.mark.parametrize("steps", [0, 2])
def test_masters_come_back_exactly(tmp_path: Path, steps: int) -> None:
    model = model_of(torch.bfloat16)
    source = hybrid(model, fraction=0.5, master_dtype=torch.float32)
    train(model, source, 0, steps)
    sp.save(tmp_path / "half", {"model": model, "optimizer": source})
    train(model, source, steps, steps + 2)
    for fraction in (0.0, 0.5, 1.0):
        other = model_of(torch.bfloat16, seed=1)
        target = hybrid(other, fraction=fraction, master_dtype=torch.float32)
        sp.load(tmp_path / "half", {"model": other, "optimizer": target})
        train(other, target, steps, steps + 2)
        masters = [slots.tensors["master"] for slots in target.describe_slots()]
        assert equal(masters, [slots.tensors["master"] for slots in source.describe_slots()])  # type: ignore[arg-type]
        assert equal(values(other), values(model))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_model_that_is_loaded_alone_stays(tmp_path: Path, fraction: float) -> None:
    saved = model_of(torch.bfloat16, seed=3)
    sp.save(tmp_path / "model", {"model": saved})
    model = model_of(torch.bfloat16)
    optimizer = hybrid(model, "momentum", fraction, master_dtype=torch.float32)
    train(model, optimizer, 0, 2)
    sp.load(tmp_path / "model", {"model": model})
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 2, 3)
    assert equal(values(model), values(saved))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_float32_model_takes_the_masters_of_a_narrow_one(tmp_path: Path, fraction: float) -> None:
    model = model_of(torch.bfloat16)
    source = hybrid(model, master_dtype=torch.float32)
    train(model, source, 0, 2)
    sp.save(tmp_path / "narrow", {"model": model, "optimizer": source})
    other = model_of(seed=1)
    target = hybrid(other, fraction=fraction, master_dtype=torch.float32)
    sp.load(tmp_path / "narrow", {"model": other, "optimizer": target}, cast=True)
    assert equal(values(other), [slots.tensors["master"] for slots in source.describe_slots()])  # type: ignore[arg-type]
