"""Default device, default dtype and inference mode of the program change nothing of a checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import shardproof as sp

SOURCE = Path(sp.__file__).parent


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "half as the default dtype": lambda: default_dtype(torch.float16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


class Loader:
    """A data loader whose state has an array, a tensor and bytes too large for the JSON of a manifest."""

    def __init__(self, value: int) -> None:
        self.state: dict[str, Any] = {
            "order": torch.full((100,), value),
            "none": torch.zeros(0, 3),
            "array": np.full(100, value),
            "bytes": bytes([value]) * 100,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def state(value: int, *, stepped: bool) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    whole = {"model": model, "optimizer": optimizer, "loader": Loader(value), "rng": sp.RandomState()}
    if stepped:
        step(whole)
    strided = torch.full((6, 8), float(value))[:, ::2]
    return whole | {"strided": strided, "own": sp.PerRank(torch.full((3,), value)), "epoch": value}


def step(whole: dict[str, Any]) -> None:
    whole["model"](torch.ones(2, 5)).sum().backward()
    whole["optimizer"].step()
    whole["optimizer"].zero_grad()


def contents(whole: dict[str, Any]) -> Any:
    """All values as lists, with the dtype, device and mode of their tensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), str(value.device), value.is_inference(), value.tolist()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value.tolist() if isinstance(value, np.ndarray) else value

    slots = whole["optimizer"].state_dict()["state"]
    return plain(
        {
            "model": dict(whole["model"].state_dict()),
            "slots": slots,
            "loader": whole["loader"].state,
            "rest": {key: whole[key] for key in ("strided", "epoch")},
            "own": whole["own"].value,
        }
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_save_or_a_load_in_a_mode_has_the_same_values(mode: str, tmp_path: Path) -> None:
    source = state(3, stepped=True)
    expected = contents(source)
    with MODES[mode]():
        sp.save(tmp_path / "in", source)
    sp.save(tmp_path / "out", source)
    for place in ("in", "out"):
        target = state(0, stepped=False)
        with MODES[mode]():
            sp.load(tmp_path / place, target)
        assert contents(target) == expected
        step(target)
        stepped = state(0, stepped=False)
        sp.load(tmp_path / "out", stepped)
        step(stepped)
        assert contents(target) == contents(stepped)


@pytest.mark.parametrize("snapshot", ["fence", "stage"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_saves_and_restores_in_a_mode(mode: str, snapshot: Any, tmp_path: Path) -> None:
    source, target = state(3, stepped=True), state(0, stepped=True)
    checkpointer = sp.Checkpointer(tmp_path, snapshot=snapshot, incremental=True)
    with MODES[mode]():
        for number in range(3):
            checkpointer.save(number, source).result()
        assert checkpointer.restore(target) == 2
    assert contents(target) == contents(source)


@pytest.mark.parametrize("mode", MODES)
def test_slices_are_read_in_a_mode(mode: str, tmp_path: Path) -> None:
    sp.save(tmp_path / "step", {"w": torch.arange(12.0).view(3, 4)})
    with MODES[mode](), sp.open(tmp_path / "step") as checkpoint:
        part, none = checkpoint["w"][1:, 2], checkpoint["w"][3:]
    assert part.tolist() == [6, 10] and part.dtype == torch.float32
    assert none.shape == (0, 4) and none.device.type == "cpu"


def test_a_mode_that_makes_tensors_without_bytes_is_refused(tmp_path: Path) -> None:
    source, target = {"w": torch.ones(300)}, {"w": torch.zeros(300)}
    sp.save(tmp_path / "step", source)
    with FakeTensorMode():
        with pytest.raises(sp.ShardproofError, match="FakeTensorMode"):
            sp.save(tmp_path / "save", source)
        with pytest.raises(sp.ShardproofError, match="FakeTensorMode"):
            sp.load(tmp_path / "step", target)
    assert target["w"].tolist() == [0] * 300
    assert not (tmp_path / "save" / "manifest.json").exists()


DRAWN = {"rand", "randn", "randint", "randperm"}
MAKERS = DRAWN | {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "as_tensor",
    "asarray",
    "eye",
    "linspace",
}


def test_every_new_tensor_names_its_device_and_dtype() -> None:
    """A program may have any default device and dtype, and ranks may have different ones."""
    unnamed = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in MAKERS
        and not {"device", "dtype"} <= {keyword.arg for keyword in call.keywords}
    ]
    assert unnamed == []
