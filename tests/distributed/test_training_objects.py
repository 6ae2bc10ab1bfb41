"""The objects of a torch training loop, saved on 2 ranks and restored on 3, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import shardproof as sp
from tests.harness import process_group, run_ranks

State = dict[str, Any]


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))


def offloaded(seed: int) -> State:
    """FSDP2 whose shards and optimizer state are on the CPU."""
    model = _model(seed)
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def muon(seed: int) -> State:
    """Muon for the matrices, AdamW for the others."""
    model = _model(seed)
    fully_shard(model)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)]
    return {"model": model, "optimizers": optimizers}


def averaged(seed: int) -> State:
    """An average of the weights, sharded like them, with a scheduler and a scaler of the loss."""
    model = _model(seed)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    fully_shard(model)
    fully_shard(average.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, 0.01 + seed, anneal_epochs=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 + seed, growth_interval=1)
    state: State = {"model": model, "average": average, "optimizer": optimizer, "schedule": schedule}
    return state | {"scaler": scaler}


class Application:
    """An object of torch's ``Stateful`` protocol, as trainers write it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: State) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def stateful(seed: int) -> State:
    """A compiled FSDP2 model whose state `get_state_dict` collects."""
    model = _model(seed)
    fully_shard(model)
    compiled: Any = torch.compile(model, backend="eager")
    return {"application": Application(compiled, torch.optim.AdamW(compiled.parameters(), lr=0.1))}


BUILDERS: dict[str, Callable[[int], State]] = {
    builder.__name__: builder for builder in (offloaded, muon, averaged, stateful)
}


def _optimizers(state: State) -> list[torch.optim.Optimizer]:
    if "application" in state:
        return [state["application"].optimizer]
    return list(state.get("optimizers", [state.get("optimizer")]))


def _parts(state: State) -> nn.Module:
    model: nn.Module = state["application"].model if "application" in state else state["model"]
    return model


def step(state: State) -> None:
    loss = _parts(state)(torch.linspace(-1, 1, 12).view(2, 6)).square().sum()
    if "scaler" in state:
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()
        state["average"].update_parameters(state["model"])
        state["schedule"].step()
    else:
        loss.backward()
        for optimizer in _optimizers(state):
            optimizer.step()
    for optimizer in _optimizers(state):
        optimizer.zero_grad()


def _whole(value: Any) -> Any:
    value = value.detach()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def everything(state: State) -> dict[str, Any]:
    """Parameters and slots, gathered by torch, and the options of the optimizers."""
    found: dict[str, Any] = {}
    for name, parameter in _parts(state).named_parameters():
        found[name] = _whole(parameter)
        for optimizer in _optimizers(state):
            for slot, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{slot}"] = _whole(value)
    for name, parameter in state["average"].named_parameters() if "average" in state else ():
        found[f"average.{name}"] = _whole(parameter)
    for number, optimizer in enumerate(_optimizers(state)):
        found[f"lr {number}"] = torch.tensor(optimizer.param_groups[0]["lr"])
    if "scaler" in state:
        found["scale"] = torch.tensor(state["scaler"].get_scale())
    if "average" in state:
        found["averaged"] = state["average"].n_averaged.clone()
    return found


def save(name: str, folder: str) -> dict[str, Any]:
    """Saves after two steps. Returns the state."""
    with process_group():
        state = BUILDERS[name](0)
        step(state)
        step(state)
        sp.save(f"{folder}/{name}", state)
        return {key: value.tolist() for key, value in everything(state).items()}


def load(name: str, folder: str) -> dict[str, Any]:
    """Loads into other values. Returns the loaded state, and trains one more step."""
    with process_group():
        state = BUILDERS[name](1)
        sp.load(f"{folder}/{name}", state)
        found = {key: value.tolist() for key, value in everything(state).items()}
        step(state)
        return found


@pytest.mark.parametrize("name", BUILDERS)
def test_objects_are_restored_on_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    expected = run_ranks(2, save, name, str(tmp_path), timeout=90)[0].value
    for outcome in run_ranks(3, load, name, str(tmp_path), timeout=90):
        assert outcome.value.keys() == expected.keys()
        assert [key for key in expected if outcome.value[key] != expected[key]] == []
