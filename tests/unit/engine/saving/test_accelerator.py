"""Tensors in device memory are saved and loaded, on any accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof._utils.accelerator import on_stream
from tests.accelerator import first_device, late_one

pytestmark = pytest.mark.gpu


def test_device_tensors_round_trip(tmp_path: Path) -> None:
    device = first_device()
    source = {
        "large": torch.randn(5000, 1000, device=device),
        "strided": torch.randn(64, 64, device=device)[::2, 1::3],
        "small": torch.randn(3, device=device, dtype=torch.bfloat16),
        "host": torch.randn(7),
    }
    sp.save(tmp_path / "c", source)
    target = {key: torch.full_like(value, 7) for key, value in source.items()}
    sp.load(tmp_path / "c", target)
    for key, value in source.items():
        assert target[key].device == value.device
        assert torch.equal(target[key], value)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_load_is_ordered_with_the_work_of_the_callers_stream(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller uses its own stream. The device lays out strided tensors after their bytes arrive."""
    monkeypatch.setattr("shardproof.engine.loading.load_protocol.reading_threads", lambda: threads)
    device = first_device()
    with on_stream(torch.Stream(device), device):
        wanted = {str(number): torch.full((600, 300), float(number), device=device) for number in range(8)}
        sp.save(tmp_path / "c", wanted)
        found = {
            key: (torch.empty_like(value) if int(key) % 2 else torch.empty_like(value.t()).t())
            for key, value in wanted.items()
        }
        for _ in range(5):
            late_one(device, 20, 1024)
            for value in found.values():
                value.fill_(-1)
            sp.load(tmp_path / "c", found)
            doubled = {key: value * 2 for key, value in found.items()}
            for key, value in doubled.items():
                assert torch.equal(value, wanted[key] * 2), key


def test_a_trained_model_and_its_generators_round_trip(tmp_path: Path) -> None:
    device = first_device()

    def build() -> dict[str, object]:
        model = torch.nn.Linear(8, 4, device=device)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": sp.RandomState()}

    state = build()
    state["model"](torch.randn(2, 8, device=device)).sum().backward()  # type: ignore[operator]
    state["optimizer"].step()  # type: ignore[attr-defined]
    sp.save(tmp_path / "c", state)
    expected = torch.randn(4, device=device)
    target = build()
    sp.load(tmp_path / "c", target)
    assert torch.equal(torch.randn(4, device=device), expected)
    saved, loaded = (tree["optimizer"].state_dict()["state"] for tree in (state, target))  # type: ignore[attr-defined]
    for slots, others in zip(saved.values(), loaded.values(), strict=True):
        for name, value in slots.items():
            assert others[name].device == value.device
            assert torch.equal(others[name], value)


def test_a_save_that_agrees_in_the_background_has_the_values_of_the_callers_stream(tmp_path: Path) -> None:
    """The caller uses its own stream, which is not current in the threads of the save."""
    device = first_device()
    with on_stream(torch.Stream(device), device):
        weight = torch.nn.Parameter(torch.zeros(600, 300, device=device))
        loose = torch.zeros(300, device=device)
        optimizer = sp.OptimizerState(torch.optim.SGD([weight], lr=0.1), names={"weight": weight})
        state = {"weight": weight, "loose": loose, "optimizer": optimizer}
        checkpointer = sp.Checkpointer(tmp_path)
        checkpointer.save(0, state).result(60)
        for number in range(1, 6):
            late_one(device, 20, 1024)
            with torch.no_grad():
                weight.fill_(number)
                loose.fill_(number)
            pending = checkpointer.save(number, state)
            loose.fill_(-1)
            pending.result(60)
            with sp.open(tmp_path / f"step-{number:08d}") as checkpoint:
                assert bool((checkpoint["weight"][...] == number).all())
                assert bool((checkpoint["loose"][...] == number).all())
