"""Modules, optimizers, schedulers: what a training loop holds."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardproof.engine.state.optimizer.slot_sources import _new_slot
from shardproof.engine.state.optimizer.slots import StoredSlot
from shardproof.errors import StructureError
from shardproof.state import OptimizerState, PerRank, bind, collect
from tests.newer_torch import OLDER
from tests.unit.engine.state.fake_checkpoint import FakeCheckpoint, saved, saved_by_ranks

DDP = nn.parallel.DistributedDataParallel
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 20).reshape(5, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def frozen(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("target_steps", [0, 2])
def test_training_after_a_load_equals_uninterrupted_training(kind: str, target_steps: int) -> None:
    model = network(1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(3):
        step(model, optimizer)
    checkpoint = saved({"model": model, "optimizer": optimizer})
    model2 = network(2)
    optimizer2 = OPTIMIZERS[kind](model2.parameters())
    for _ in range(target_steps):
        step(model2, optimizer2)
    checkpoint.load({"model": model2, "optimizer": optimizer2})
    assert same(optimizer2.state_dict(), optimizer.state_dict())
    assert same(dict(model2.state_dict()), dict(model.state_dict()))
    step(model, optimizer)
    step(model2, optimizer2)
    assert same(dict(model2.state_dict()), dict(model.state_dict()))
    assert same(optimizer2.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps", [0, 1])
def test_collecting_and_binding_change_nothing(kind: str, steps: int) -> None:
    model = network(1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    before, weights, entries = frozen(optimizer), copy.deepcopy(model.state_dict()), len(optimizer.state)
    grads = [parameter.grad for parameter in model.parameters()]
    other = network(3)
    trained = OPTIMIZERS[kind](other.parameters())
    step(other, trained)
    another = saved({"model": other, "optimizer": trained})
    generator = torch.get_rng_state()
    checkpoint = saved({"model": model, "optimizer": optimizer})
    another.bind({"model": model, "optimizer": optimizer})
    checkpoint.bind({"model": model, "optimizer": optimizer})
    assert torch.equal(torch.get_rng_state(), generator)
    assert same(optimizer.state_dict(), before) and len(optimizer.state) == entries
    assert same(dict(model.state_dict()), dict(weights))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(p.requires_grad for p in model.parameters())


def test_an_optimizer_before_its_first_step_is_saved_without_state() -> None:
    model = network(1)
    checkpoint = saved({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert not [key for key in checkpoint.catalogue.tensors if key.startswith("optimizer")]
    target = network(2)
    optimizer = torch.optim.AdamW(target.parameters(), lr=0.5)
    step(target, optimizer)
    checkpoint.load({"model": target, "optimizer": optimizer})
    assert len(optimizer.state) == 0, "a load removes state that the checkpoint does not have"
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_parameters_without_gradients_have_no_state() -> None:
    model, target = network(1), network(2)
    for part in (model, target):
        part[2].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    checkpoint = saved({"model": model, "optimizer": optimizer})
    assert checkpoint.objects["optimizer.2.weight.@options"]["slots"] == []
    assert checkpoint.objects["optimizer.0.weight.@options"]["slots"] == ["exp_avg", "exp_avg_sq", "step"]
    optimizer2 = torch.optim.AdamW(target.parameters())
    checkpoint.load({"model": target, "optimizer": optimizer2})
    assert same(optimizer2.state_dict(), optimizer.state_dict())


def test_sgd_without_momentum_has_no_state() -> None:
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    assert not [key for key in saved({"m": model, "o": optimizer}).catalogue.tensors if key.startswith("o.")]


def test_regrouped_and_reordered_parameters_get_their_own_state() -> None:
    model, target = network(1), network(2)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 0.7}])
    step(model, optimizer)
    checkpoint = saved({"model": model, "optimizer": optimizer})
    groups = [
        {"params": [p for p in target.parameters() if p.dim() == 1][::-1]},
        *[{"params": [p]} for p in target.parameters() if p.dim() > 1],
    ]
    optimizer2 = torch.optim.AdamW(groups, lr=9.0)
    checkpoint.load({"model": target, "optimizer": optimizer2})
    assert [group["lr"] for group in optimizer2.param_groups] == [0.7, 1e-3, 1e-3]
    assert [group["weight_decay"] for group in optimizer2.param_groups] == [0.01, 0.3, 0.3]
    for ours, theirs in zip(target.parameters(), model.parameters(), strict=True):
        assert same(optimizer2.state[ours], optimizer.state[theirs])


def test_options_that_disagree_in_a_group_are_named() -> None:
    model, target = network(1), network(2)
    optimizer = torch.optim.AdamW([{"params": [p], "lr": i + 1.0} for i, p in enumerate(model.parameters())])
    checkpoint = saved({"model": model, "optimizer": optimizer})
    tree = {"model": target, "optimizer": torch.optim.AdamW(target.parameters(), lr=5.0)}
    (mismatch,) = checkpoint.bind(tree).mismatched
    assert "lr=1.0 as for 0.weight" in mismatch.expected and mismatch.found == "lr=2.0"
    binding = checkpoint.load(tree, strict=False)
    assert not binding.mismatched
    assert tree["optimizer"].param_groups[0]["lr"] == 5.0  # type: ignore[union-attr]


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place() -> None:
    model, target = network(1), network(2)
    lr = torch.tensor(5.0)
    source = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    optimizer = torch.optim.AdamW(target.parameters(), lr=lr)
    saved({"model": model, "o": source}).load({"model": target, "o": optimizer})
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == 0.25
    plain = torch.optim.AdamW(target.parameters(), lr=5.0)
    saved({"model": model, "o": source}).load({"model": target, "o": plain})
    assert plain.param_groups[0]["lr"] == 0.25


def test_missing_state_is_made_where_torch_would_make_it() -> None:
    model = network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    checkpoint = saved({"model": model, "o": optimizer})
    target = network(2).to(torch.bfloat16)
    fresh = torch.optim.AdamW(target.parameters())
    checkpoint.load({"model": target, "o": fresh})
    state = fresh.state[target[0].weight]  # type: ignore[index]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["step"].shape == () and state["step"].item() == 1
    for parameter in target.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()  # torch's AdamW refuses averages of another dtype than the gradient's


def test_a_load_keeps_the_targets_foreach_and_fused_options() -> None:
    model = network(1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True, betas=(0.5, 0.6))
    step(model, optimizer)
    checkpoint = saved({"model": model, "o": optimizer})
    assert checkpoint.objects["o.0.weight.@options"]["options"]["fused"] is True
    target = network(2)
    fresh = torch.optim.Adam(
        [{"params": [target[0].weight], "foreach": True}, {"params": [*target.parameters()][1:]}]  # type: ignore[index]
    )
    checkpoint.load({"model": target, "o": fresh})
    assert [(group["fused"], group["foreach"]) for group in fresh.param_groups] == [
        (None, True),
        (None, None),
    ]
    assert fresh.param_groups[0]["betas"] == (0.5, 0.6)
    step(model, optimizer)
    step(target, fresh)
    regrouped = torch.optim.Adam([{"params": [*model.parameters()][:1], "foreach": True}], fused=False)
    regrouped.add_param_group({"params": [*model.parameters()][1:], "foreach": False})
    joined = torch.optim.Adam(model.parameters())
    saved({"model": model, "o": regrouped}).load({"model": model, "o": joined})
    assert joined.param_groups[0]["foreach"] is None


@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_new_step_counts_are_on_the_device_that_the_group_needs(
    options: dict[str, Any], device: str, shape: tuple[int, ...]
) -> None:
    parameter = torch.empty(shape, device="meta")
    assert _new_slot(parameter, options, "step", StoredSlot(torch.float32, ())).device.type == device
    assert _new_slot(parameter, options, "eta", StoredSlot(torch.float32, ())).device.type == "meta"
    assert _new_slot(parameter, options, "exp_avg", StoredSlot(torch.float32, shape)).shape == shape


def test_state_of_another_optimizer_is_a_mismatch_unless_not_strict() -> None:
    model, target = network(1), network(2)
    source = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, source)
    checkpoint = saved({"model": model, "o": source})
    other = torch.optim.Adam(target.parameters())
    (mismatch,) = checkpoint.bind({"model": target, "o": other}).mismatched
    assert mismatch.key == "o.0.weight.@options" and mismatch.expected == "state of Adam"
    assert mismatch.found == "state of AdamW; strict=False loads it anyway"
    checkpoint.load({"model": target, "o": other}, strict=False)
    assert same(other.state_dict()["state"], source.state_dict()["state"])
    for key, data in checkpoint.objects.items():
        if key.endswith("@options"):
            del data["class"]
    assert not checkpoint.bind({"model": target, "o": other}).mismatched


def test_state_that_is_not_selected_stays() -> None:
    model = network(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, optimizer)
    checkpoint = saved({"model": model, "o": optimizer})
    target = network(2)
    mine = torch.optim.AdamW(target.parameters(), lr=0.1)
    step(target, mine)
    before = frozen(mine)
    checkpoint.load({"model": target, "o": mine}, exact=False, selected=lambda key: key.startswith("model"))
    assert same(mine.state_dict(), before)
    assert same(dict(target.state_dict()), dict(model.state_dict()))
    options_only = checkpoint.bind(
        {"model": target, "o": mine}, selected=lambda key: key.startswith("o.") and "exp_avg" not in key
    )
    assert {entry.key.rpartition(".")[2] for entry in options_only.tensors} == {"step"}


def test_names_come_from_the_tree_or_are_given() -> None:
    model, critic = network(1), nn.Linear(2, 2)
    both = torch.optim.AdamW([*model.parameters(), *critic.parameters()])
    keys = saved({"nets": [model, critic], "opt": both}).objects
    assert "opt.nets.0.2.weight.@options" in keys and "opt.nets.1.bias.@options" in keys
    alone = torch.optim.AdamW(model.parameters())
    with pytest.raises(StructureError, match="OptimizerState"):
        collect({"opt": alone})
    for wrapped in (
        OptimizerState(alone, model),
        OptimizerState(alone, names=model.named_parameters()),
        torch.optim.AdamW(model.named_parameters()),
    ):
        assert "opt.2.weight.@options" in saved({"opt": wrapped}).objects
    assert "opt.1.bias.@options" in saved({"opt": OptimizerState(both, model, critic)}).objects
    whole = nn.ModuleDict({"a": critic, "b": model})
    assert "o.b.0.bias.@options" in saved({"part": model, "whole": whole, "o": both}).objects


def test_an_optimizer_that_overrides_state_dict_must_be_wrapped() -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "more": 1}

    model = network(1)
    optimizer = Own(model.parameters(), lr=0.1)
    with pytest.raises(StructureError, match="overrides state_dict"):
        collect({"m": model, "o": optimizer})
    assert collect({"m": model, "o": OptimizerState(optimizer)}).objects


def test_state_beside_parameters_is_saved_and_unknown_parameters_are_refused() -> None:
    model, target = network(1), network(2)
    optimizer, optimizer2 = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, target))
    step(model, optimizer)
    optimizer.state["seen"] = {"tokens": 7, "norm": torch.ones(2)}  # type: ignore[index]
    saved({"m": model, "o": optimizer}).load({"m": target, "o": optimizer2})
    assert same(optimizer2.state["seen"], optimizer.state["seen"])  # type: ignore[index]
    optimizer.state[nn.Parameter(torch.ones(1))] = {}
    with pytest.raises(StructureError, match="none of its groups"):
        collect({"m": model, "o": optimizer})


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.extra = value
        self.register_buffer("kept", torch.full((2,), 1.0))
        self.register_buffer("not_kept", torch.full((2,), 1.0), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_buffers_and_extra_state() -> None:
    source = nn.ModuleDict({"x": Extra({"amax": torch.ones(3), "n": (1, 2)}), "t": Extra(torch.ones(5))})
    source["x"].kept.fill_(4)  # type: ignore[operator, union-attr]
    checkpoint = saved({"m": source})
    assert set(checkpoint.catalogue.tensors) == {
        "m.x.kept",
        "m.t.kept",
        "m.x._extra_state.amax",
        "m.t._extra_state.@data",
    }
    target = nn.ModuleDict({"x": Extra(None), "t": Extra(torch.zeros(5))})
    checkpoint.load({"m": target})
    assert same(target["x"].extra, source["x"].extra) and same(target["t"].extra, source["t"].extra)
    assert target["x"].kept.tolist() == [4, 4]  # type: ignore[operator, union-attr]


def test_a_parameter_without_a_storage_has_its_options_collected() -> None:
    """A save asks for the memory that the optimizer writes only if the save is guarded."""
    sparse = torch.eye(2).to_sparse()
    state = OptimizerState(torch.optim.SGD([sparse], lr=0.1), names={"w": sparse})
    assert [entry.key for entry in collect({"o": state}).objects] == ["o.w.@options"]


def test_tied_weights_are_stored_once_and_tied_again() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model, target = Tied(), Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embed(torch.tensor([1]))).sum().backward()
    optimizer.step()
    checkpoint = saved({"model": model, "optimizer": optimizer})
    assert checkpoint.aliases == {"model.head.weight": "model.embed.weight"}
    assert "optimizer.embed.weight.@options" in checkpoint.objects
    checkpoint.load({"model": target, "optimizer": torch.optim.AdamW(target.parameters())})
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.head.weight, model.embed.weight)


def test_wrappers_leave_no_trace_in_keys() -> None:
    model = network(1)
    keys = [entry.key for entry in collect({"m": model}).tensors]
    wrapped = nn.Sequential(checkpoint_wrapper(model[0]), *list(model)[1:])  # type: ignore[index]
    optimizer = torch.optim.AdamW(wrapped.parameters())
    compiled = torch.compile(wrapped)
    found = collect({"m": compiled, "o": optimizer})
    assert [entry.key for entry in found.tensors] == keys
    assert found.objects[1].key == "o.0.weight.@options"


def _nested(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(DDP(model[0])), *list(model)[1:-1], torch.compile(DDP(model[-1])))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "wrap",
    [
        DDP,
        lambda model: torch.compile(DDP(model)),
        lambda model: DDP(torch.compile(model)),
        lambda model: nn.DataParallel(model),
        lambda model: nn.DataParallel(torch.compile(DDP(checkpoint_wrapper(model)))),
        _nested,
        lambda model: DDP(_nested(model)),
    ],
)
def test_data_parallel_wrappers_leave_no_trace_in_keys_and_names(wrap: Callable[[Any], nn.Module]) -> None:
    source = nn.Sequential(*network(1), nn.Sequential(nn.ModuleDict({"module": nn.Linear(2, 2)})["module"]))
    wrapped = wrap(copy.deepcopy(source))
    optimizers = [torch.optim.AdamW(part.parameters()) for part in (source, wrapped)]
    for part, optimizer in zip((source, wrapped), optimizers, strict=True):
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    plain = collect({"m": source, "o": optimizers[0]})
    found = collect({"m": wrapped, "o": optimizers[1]})
    assert [entry.key for entry in found.tensors] == [entry.key for entry in plain.tensors]
    assert found.objects == plain.objects
    alone = collect({"o": OptimizerState(optimizers[1], wrapped)})
    assert alone.objects == collect({"o": OptimizerState(optimizers[0], source)}).objects
    target = network(5)
    target.append(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[operator]
    optimizer = torch.optim.AdamW(target.parameters(), lr=9.0)
    saved({"m": wrapped, "o": optimizers[1]}).load({"m": target, "o": optimizer})
    assert same(dict(target.state_dict()), dict(source.state_dict()))
    assert same(optimizer.state_dict(), optimizers[0].state_dict())
    saved({"m": source, "o": optimizers[0]}).load({"m": wrapped, "o": optimizers[1]})


@pytest.mark.usefixtures("process_group")
def test_a_module_named_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    keys = [entry.key for entry in collect({"m": model}).tensors]
    assert keys == ["m.module.module.bias", "m.module.module.weight"]
    assert [entry.key for entry in collect({"m": DDP(model)}).tensors] == keys
    model["module"] = DDP(model["module"])
    assert [entry.key for entry in collect({"m": model}).tensors] == keys


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile, DDP])
@pytest.mark.usefixtures("process_group")
def test_extra_state_of_a_wrapped_module_reaches_the_module(wrap: Callable[[Any], Any]) -> None:
    def model(value: Any) -> nn.Module:
        extra = Extra(value)
        extra.weight = nn.Parameter(torch.ones(1))
        return nn.Sequential(wrap(extra), nn.Linear(1, 1))

    source, target = model({"amax": torch.ones(3)}), model(None)
    checkpoint = saved({"m": source})
    assert "m.0._extra_state" in checkpoint.objects
    checkpoint.load({"m": target})
    (owner,) = [part for part in target.modules() if type(part) is Extra]
    assert same(owner.extra, {"amax": torch.ones(3)})
    whole = model(None)[0]  # type: ignore[index]
    saved({"m": Extra(7)}).load({"m": whole}, exact=False)
    (owner,) = [part for part in whole.modules() if type(part) is Extra]
    assert owner.extra == 7


class Halved(nn.Module):
    """A module whose state dict holds computed tensors, not its own memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))
        self.plain = nn.Parameter(torch.full((4,), value))
        self.register_state_dict_post_hook(self._halve)
        self.register_load_state_dict_pre_hook(self._double)

    @staticmethod
    def _halve(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].detach() / 2
        state[prefix + "note"] = ("halved", 2)

    @staticmethod
    def _double(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        assert state.pop(prefix + "note") == ("halved", 2)


def test_state_dicts_made_up_by_hooks_go_back_through_load_state_dict() -> None:
    source, target = nn.ModuleDict({"h": Halved(6.0)}), nn.ModuleDict({"h": Halved(1.0)})
    checkpoint = saved({"m": source})
    assert checkpoint.full["m.h.weight"].tolist() == [3.0] * 4
    binding = checkpoint.bind({"m": target})
    assert len(binding.tensors) == 2
    checkpoint.load({"m": target})
    assert same(dict(target.state_dict()), dict(source.state_dict()))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2, 2]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
@pytest.mark.parametrize("lr", [0.1, "tensor"])
def test_schedulers(kind: str, lr: Any) -> None:
    if OLDER and (kind, lr) == ("sequential", "tensor"):
        pytest.skip("the schedulers of an older torch share the tensor of the rate")

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = network(1)
        rate = torch.tensor(0.1) if lr == "tensor" else lr
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def advance(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.step()
        scheduler.step(*([1.0] if kind == "plateau" else []))

    model, optimizer, scheduler = made()
    for _ in range(3):
        advance(optimizer, scheduler)
    checkpoint = saved({"m": model, "o": optimizer, "s": scheduler})
    model2, optimizer2, scheduler2 = made()
    checkpoint.load({"m": model2, "o": optimizer2, "s": scheduler2})
    for _ in range(3):
        assert same(scheduler2.state_dict(), scheduler.state_dict())
        assert float(optimizer2.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])
        advance(optimizer, scheduler)
        advance(optimizer2, scheduler2)


class Loader:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_an_object_with_state_dict_is_stored_as_one_object_and_its_tensors() -> None:
    state = {
        "position": 3,
        "buffer": [torch.arange(5), (torch.ones(2, 2), None)],
        "blob": b"x" * 100,
        "short": b"y",
        1: torch.zeros(1),
        "1": torch.ones(1),
        "array": np.arange(100),
    }
    checkpoint = saved({"data": Loader(state)})
    assert list(checkpoint.objects) == ["data"]
    assert {"data.buffer.0", "data.buffer.1.0", "data.blob", "data.array"} < set(checkpoint.catalogue.tensors)
    target = Loader(None)
    checkpoint.load({"data": target})
    assert target.state.keys() == state.keys()
    for key in state.keys() - {"array"}:
        assert same(target.state[key], state[key]), key
    assert (target.state["array"] == state["array"]).all()


def test_an_error_in_state_dict_is_raised_unchanged_and_gc_stays_enabled() -> None:
    class Broken(Loader):
        def state_dict(self) -> Any:
            raise OSError("the data set is gone")

    with pytest.raises(OSError, match="the data set is gone"):
        collect({"data": Broken(None)})
    assert gc.isenabled()


@pytest.mark.parametrize("container", ["dict", "module"])
def test_collecting_twenty_thousand_small_tensors_is_quick(container: str) -> None:
    tensors = [torch.zeros(4) for _ in range(20_000)]
    tree: Any = (
        {str(i): t for i, t in enumerate(tensors)} if container == "dict" else nn.ParameterList(tensors)
    )
    seconds = []
    for _ in range(5):
        begun = time.process_time()
        collect({"x": tree})
        seconds.append(time.process_time() - begun)
    assert min(seconds) < 0.4, f"{min(seconds):.3f} s; on an idle machine this takes about 0.1 s"


def test_a_whole_tree_binds_to_its_own_checkpoint() -> None:
    model = network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    tree = {"model": model, "optimizer": optimizer, "step": 3}
    checkpoint = FakeCheckpoint([collect(tree)])
    binding = bind(tree, checkpoint.catalogue)
    assert [entry.key for entry in binding.tensors] == sorted(checkpoint.catalogue.tensors)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_fills_no_optimizer_beside_per_rank_parameters(ranks: int) -> None:
    """An older checkpoint may have the slots of one rank under its keys."""
    model = torch.nn.Linear(2, 2)
    checkpoint = saved_by_ranks(lambda rank: {"model": PerRank(model)}, ranks)
    tree = {"model": PerRank(model), "optimizer": torch.optim.Adam(model.parameters())}
    refused = pytest.raises(StructureError, match=r"trains model\.@rank-0\.weight, .*shardproof\.PerRank")
    with refused if ranks > 1 else nullcontext():
        checkpoint.bind(tree, world_size=ranks)
