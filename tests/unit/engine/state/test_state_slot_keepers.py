"""Optimizers that describe their own state: flat ranges, masters, and state of the whole optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.errors import KeyMismatchError, StructureError
from shardproof.frameworks import dcp
from shardproof.layouts import vocabulary
from shardproof.optim import HybridDeviceOptimizer
from shardproof.state import LocalRange, ParameterSlots, Receipt, StoredSlot


class FlatMomentum(torch.optim.Optimizer):
    """A slot provider: a flat momentum buffer, and a master where the parameter is narrower than float32."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.flat: dict[torch.Tensor, torch.Tensor] = {}
        self.masters: dict[torch.Tensor, torch.Tensor] = {}
        self.scale = 1.0
        for parameter in self._parameters():
            if parameter.dtype != torch.float32:
                self.masters[parameter] = parameter.detach().float()

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def describe_slots(self) -> Iterable[ParameterSlots]:
        for parameter in self._parameters():
            tensors: dict[str, torch.Tensor | LocalRange] = {}
            if parameter in self.flat:
                tensors["momentum"] = LocalRange(self.flat[parameter], 0, parameter.numel())
            if parameter in self.masters:
                tensors["master"] = self.masters[parameter]
            yield ParameterSlots(parameter, "SGD", {"lr": 0.1}, tensors, {})

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        tensors: dict[str, torch.Tensor | LocalRange] = {}
        if "momentum" in stored:
            assert stored["momentum"].shape == tuple(parameter.shape)
            buffer = torch.zeros(parameter.numel(), dtype=stored["momentum"].dtype)
            tensors["momentum"] = LocalRange(buffer, 0, parameter.numel())
        if parameter in self.masters:
            tensors["master"] = torch.zeros(parameter.shape)

        def attach(values: Mapping[str, Any], filled: frozenset[str]) -> None:
            self.flat.pop(parameter, None)
            if "momentum" in filled:
                self.flat[parameter] = tensors["momentum"].buffer  # type: ignore[union-attr]
            if parameter in self.masters:
                fresh = tensors["master"] if "master" in filled else parameter.detach().float()
                self.masters[parameter] = fresh  # type: ignore[assignment]

        return Receipt("SGD", tensors, attach)

    def describe_shared(self) -> dict[str, Any]:
        return {"scale": self.scale} if self.scale != 1.0 else {}

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]


def model_of(dtype: torch.dtype, seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 4).to(dtype)


def tree(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer}


def test_a_slot_provider_is_restored(tmp_path: Path) -> None:
    model = model_of(torch.bfloat16, 0)
    provider = FlatMomentum(model.parameters())
    provider.flat[model.weight] = torch.arange(12.0)
    provider.masters[model.weight] += 1e-4  # more precise than the parameter's dtype
    provider.scale = 512.0
    sp.save(tmp_path / "step", tree(model, provider))

    other = model_of(torch.bfloat16, 1)
    again = FlatMomentum(other.parameters())
    again.flat[other.bias] = torch.ones(4)
    sp.load(tmp_path / "step", tree(other, again))
    assert torch.equal(again.flat[other.weight], torch.arange(12.0))
    assert other.bias not in again.flat
    assert torch.equal(again.masters[other.weight], provider.masters[model.weight])
    assert again.scale == 512.0


def test_missing_masters_are_made_from_the_stored_parameter(tmp_path: Path) -> None:
    exact = model_of(torch.float32, 0)
    sp.save(tmp_path / "float32", tree(exact, torch.optim.SGD(exact.parameters())))
    narrow = model_of(torch.bfloat16, 1)
    provider = FlatMomentum(narrow.parameters())
    sp.load(tmp_path / "float32", tree(narrow, provider), cast=True)
    assert torch.equal(narrow.weight, exact.weight.bfloat16())
    assert torch.equal(provider.masters[narrow.weight], exact.weight)

    sp.save(tmp_path / "bfloat16", tree(narrow, torch.optim.SGD(narrow.parameters())))
    other = model_of(torch.bfloat16, 2)
    provider = FlatMomentum(other.parameters())
    sp.load(tmp_path / "bfloat16", tree(other, provider))
    assert torch.equal(provider.masters[other.weight], narrow.weight.float())


def test_a_float32_parameter_takes_the_values_of_stored_masters(tmp_path: Path) -> None:
    narrow = model_of(torch.bfloat16, 0)
    provider = FlatMomentum(narrow.parameters())
    provider.masters[narrow.weight] += 1e-4
    sp.save(tmp_path / "step", tree(narrow, provider))
    wide = model_of(torch.float32, 1)
    plain = torch.optim.SGD(wide.parameters())
    sp.load(tmp_path / "step", tree(wide, plain), cast=True)
    assert torch.equal(wide.weight, provider.masters[narrow.weight])
    assert not plain.state

    same = model_of(torch.bfloat16, 1)
    sp.load(tmp_path / "step", tree(same, torch.optim.SGD(same.parameters())))
    assert torch.equal(same.weight, narrow.weight)


def test_a_plain_optimizer_takes_flat_slots_and_gives_them_back(tmp_path: Path) -> None:
    model = model_of(torch.float32, 0)
    provider = FlatMomentum(model.parameters())
    provider.flat[model.weight] = torch.arange(12.0)
    provider.scale = 2.0
    sp.save(tmp_path / "step", tree(model, provider))
    other = model_of(torch.float32, 1)
    plain = torch.optim.SGD(other.parameters())
    sp.load(tmp_path / "step", tree(other, plain))
    assert torch.equal(plain.state[other.weight]["momentum"], torch.arange(12.0).view(4, 3))
    assert all(isinstance(item, torch.Tensor) for item in plain.state)
    sp.save(tmp_path / "back", tree(other, plain))
    again = FlatMomentum(model.parameters())
    sp.load(tmp_path / "back", tree(model, again))
    assert torch.equal(again.flat[model.weight], torch.arange(12.0))


def test_state_of_another_optimizer_class_is_a_mismatch(tmp_path: Path) -> None:
    model = model_of(torch.float32, 0)
    sp.save(tmp_path / "step", tree(model, torch.optim.AdamW(model.parameters())))
    with pytest.raises(KeyMismatchError, match="state of SGD"):
        sp.load(tmp_path / "step", tree(model, FlatMomentum(model.parameters())))


def test_a_slot_that_a_provider_does_not_receive_is_a_mismatch(tmp_path: Path) -> None:
    class DecliningSlots(FlatMomentum):
        def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
            taken = super().receive_slots(parameter, stored)
            return Receipt(taken.kind, {}, taken.attach)

    model = model_of(torch.float32, 0)
    provider = FlatMomentum(model.parameters())
    provider.flat[model.weight] = torch.arange(12.0)
    sp.save(tmp_path / "step", tree(model, provider))
    with pytest.raises(KeyMismatchError, match="optimizer.weight.momentum"):
        sp.load(tmp_path / "step", tree(model, DecliningSlots(model.parameters())))


def test_a_provider_receives_all_slots_of_a_parameter_or_none(tmp_path: Path) -> None:
    model = model_of(torch.bfloat16, 0)
    provider = FlatMomentum(model.parameters())
    sp.save(tmp_path / "step", tree(model, provider))
    with pytest.raises(StructureError, match="all slots of a parameter or none"):
        sp.load(tmp_path / "step", tree(model, provider), exclude="optimizer.weight.master")


def test_a_master_does_not_fill_a_weight_that_is_left_out(tmp_path: Path) -> None:
    narrow = model_of(torch.bfloat16, 0)
    sp.save(tmp_path / "step", tree(narrow, FlatMomentum(narrow.parameters())))
    for make in (torch.optim.SGD, HybridDeviceOptimizer):
        wide = model_of(torch.float32, 1)
        before = wide.weight.detach().clone()
        options = {"optimizer_class": torch.optim.SGD} if make is HybridDeviceOptimizer else {}
        optimizer = make(wide.parameters(), **options)
        sp.load(tmp_path / "step", tree(wide, optimizer), include="optimizer.*", cast=True)
        assert torch.equal(wide.weight, before)


def test_padding_stays_where_a_parameter_takes_a_masters_values(tmp_path: Path) -> None:
    def padded(dtype: torch.dtype, seed: int) -> torch.nn.Embedding:
        torch.manual_seed(seed)
        table = torch.nn.Embedding(8, 3).to(dtype)
        vocabulary(table, "weight", 6)
        return table

    narrow = padded(torch.bfloat16, 0)
    provider = FlatMomentum(narrow.parameters())
    sp.save(tmp_path / "step", tree(narrow, provider))
    wide = padded(torch.float32, 1)
    padding = wide.weight[6:].detach().clone()
    sp.load(tmp_path / "step", tree(wide, torch.optim.SGD(wide.parameters())), cast=True)
    assert torch.equal(wide.weight[:6], provider.masters[narrow.weight][:6])
    assert torch.equal(wide.weight[6:], padding)


@pytest.mark.parametrize(
    ("stored", "held"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_a_plain_optimizer_goes_on_with_state_of_another_dtype(
    tmp_path: Path, stored: torch.dtype, held: torch.dtype
) -> None:
    model = model_of(stored, 0)
    adam = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    sp.save(tmp_path / "step", tree(model, adam))
    other = model_of(held, 1)
    again = torch.optim.AdamW(other.parameters(), foreach=False)
    sp.load(tmp_path / "step", tree(other, again), cast=True)
    assert again.state[other.weight]["exp_avg"].dtype == held
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    again.step()
    assert again.state[other.weight]["step"] == 2


class Divided:
    """An optimizer of Megatron-Core: its `state_dict` has the options alone."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1}]

    def state_dict(self) -> dict[str, Any]:
        return {"lr": 0.1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the options."""

    def sharded_state_dict(self, model: dict[str, Any]) -> dict[str, Any]:
        return {"moments": "of each rank"}


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_that_divides_its_state_among_ranks_is_refused(named: bool, tmp_path: Path) -> None:
    """`test_megatron_core.py` has the real ones, and what the error advises."""
    optimizer, module = Divided(), torch.nn.Linear(2, 2)
    value = sp.OptimizerState(optimizer, module) if named else [optimizer]  # type: ignore[arg-type]
    sp.save(tmp_path / "other", {"module": module})
    for act, path in ((sp.save, tmp_path / "step"), (sp.load, tmp_path / "other")):
        with pytest.raises(StructureError, match=r"Divided, which divides its state .* `live_state\("):
            act(path, {"optimizer": value})


def test_dcp_refuses_it_too(tmp_path: Path) -> None:
    """torch's `dcp.save` stores the options alone."""
    dcp.save({"optimizer": {"lr": 0.2}}, checkpoint_id=tmp_path / "other")
    for act, path in ((dcp.save, tmp_path / "step"), (dcp.load, tmp_path / "other")):
        with pytest.raises(StructureError, match=r"state_dict\['optimizer'\] is a .*Divided, which divides"):
            act({"optimizer": Divided()}, checkpoint_id=path)
