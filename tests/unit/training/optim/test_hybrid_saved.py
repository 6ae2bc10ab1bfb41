"""Checkpoints of the hybrid optimizer: other fractions, a plain optimizer, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.layouts import vocabulary
from shardproof.optim import HybridDeviceOptimizer
from tests.unit.training.optim.hybrid_samples import equal, hybrid, model_of, plain, train, values

KINDS = ["adamw", "momentum", "lion"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_training_goes_on_at_any_fraction_and_with_a_plain_optimizer(
    tmp_path: Path, kind: str, steps: int
) -> None:
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
def test_masters_are_restored_exactly(tmp_path: Path, steps: int) -> None:
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
def test_stale_masters_do_not_undo_a_load_of_the_model_alone(tmp_path: Path, fraction: float) -> None:
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


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_masters_are_saved_as_the_weights_loaded_after_the_last_step(tmp_path: Path, fraction: float) -> None:
    """No step has refreshed the masters after the load, and describing them does not refresh them."""
    loaded = model_of(torch.bfloat16, seed=1)
    sp.save(tmp_path / "model", {"model": loaded})
    model = model_of(torch.bfloat16)
    optimizer = hybrid(model, fraction=fraction, master_dtype=torch.float32)
    sp.load(tmp_path / "model", {"model": model})
    sp.save(tmp_path / "both", {"model": model, "optimizer": optimizer})
    again = model_of(torch.bfloat16, seed=2)
    other = hybrid(again, fraction=fraction, master_dtype=torch.float32)
    sp.load(tmp_path / "both", {"model": again, "optimizer": other})
    from_state_dict = hybrid(loaded, fraction=fraction, master_dtype=torch.float32)
    from_state_dict.load_state_dict(optimizer.state_dict())
    for one, its in ((model, optimizer), (again, other), (loaded, from_state_dict)):
        train(one, its, 0, 1)
    assert equal(values(again), values(model))
    assert equal(values(loaded), values(model))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_load_leaves_padding_as_it_is(tmp_path: Path, fraction: float, dtype: torch.dtype) -> None:
    def padded(dtype: torch.dtype) -> tuple[torch.nn.Module, HybridDeviceOptimizer]:
        table = torch.nn.Embedding(8, 3).to(dtype)
        vocabulary(table, "weight", 6)
        options = {"cpu_fraction": fraction, "master_dtype": torch.float32, "lr": 0.5}
        return table, HybridDeviceOptimizer(table.parameters(), torch.optim.SGD, **options)

    saved, optimizer = padded(torch.bfloat16)
    sp.save(tmp_path / "step", {"model": saved, "optimizer": optimizer})
    table, optimizer = padded(dtype)
    padding = table.weight[6:].detach().clone()
    sp.load(tmp_path / "step", {"model": table, "optimizer": optimizer}, cast=True)
    table.weight.grad = torch.zeros_like(table.weight)
    optimizer.step()
    assert torch.equal(table.weight[6:], padding)
    assert torch.equal(table.weight[:6], saved.weight[:6].to(dtype))
