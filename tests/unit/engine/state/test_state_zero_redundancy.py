"""ZeroRedundancyOptimizer: the parameters of each rank, tested with a fake process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.engine.state.optimizer.slot_sources import (
    inner_optimizer,
    is_zero_redundancy,
    owned_receiver,
    owned_slots,
)
from shardproof.engine.state.optimizer.slots import ParameterSlots, Receipt, Receiver, StoredSlot
from shardproof.errors import StructureError
from shardproof.optim import HybridDeviceOptimizer
from shardproof.state import Catalogue, bind
from tests.unit.engine.state.fake_checkpoint import saved

RANKS = 3


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def _optimizer(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    groups = [{"params": biases, "weight_decay": 0.5}, {"params": weights}]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.25, **options)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def slots_of(optimizer: torch.optim.Optimizer) -> list[ParameterSlots]:
    """The slots of an optimizer of torch."""
    return [
        ParameterSlots(parameter, "AdamW", {"lr": "inner"}, dict(optimizer.state.get(parameter, {})), {})
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@pytest.mark.parametrize("bucket_view", [False, True])
def test_every_parameter_is_owned_by_one_rank(bucket_view: bool) -> None:
    seen: list[str] = []
    for rank in range(RANKS):
        with as_rank(rank):
            model = _model()
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            optimizer = _optimizer(model, parameters_as_bucket_view=bucket_view)
            before = owned_slots(optimizer, slots_of)
            assert [slots.tensors for slots in before] == [{}] * len(before)
            _step(model, optimizer)
            for slots in owned_slots(optimizer, slots_of):
                seen.append(names[id(slots.parameter)])
                assert {slot: tuple(value.shape) for slot, value in slots.tensors.items()} == {
                    "step": (),
                    "exp_avg": tuple(slots.parameter.shape),
                    "exp_avg_sq": tuple(slots.parameter.shape),
                }
    assert sorted(seen) == sorted(dict(_model().named_parameters()))


def test_options_are_those_that_a_scheduler_sees() -> None:
    with as_rank(0):
        model = _model()
        optimizer = _optimizer(model)
        optimizer.param_groups[0]["lr"] = 0.125  # the inner optimizer gets it at the next step
        assert [group["lr"] for group in inner_optimizer(optimizer).param_groups] == [0.25, 0.25]
        for slots in owned_slots(optimizer, slots_of):
            expected = (0.125, 0.5) if slots.parameter.dim() == 1 else (0.25, 0.01)
            assert (slots.options["lr"], slots.options["weight_decay"]) == expected
            assert "params" not in slots.options


def test_a_group_that_was_added_is_described() -> None:
    seen = 0
    for rank in range(RANKS):
        with as_rank(rank):
            model = _model()
            optimizer = _optimizer(model)
            added = [
                nn.Parameter(torch.zeros(7)),
                nn.Parameter(torch.zeros(2, 4)),
                nn.Parameter(torch.zeros(1)),
            ]
            optimizer.add_param_group({"params": added, "lr": 0.5})
            mine = [slots for slots in owned_slots(optimizer, slots_of) if slots.options["lr"] == 0.5]
            assert all(any(slots.parameter is parameter for parameter in added) for slots in mine)
            seen += len(mine)
    assert seen == 3


def test_only_the_owner_receives_stored_slots() -> None:
    owners: dict[str, list[int]] = {}

    def receiver(inner: torch.optim.Optimizer) -> Receiver:
        assert inner is optimizer.optim
        return lambda parameter, group, stored: Receipt(
            "AdamW", {"exp_avg": torch.zeros_like(parameter)}, lambda values, filled: None
        )

    stored = {"exp_avg": StoredSlot(torch.float32, (5,))}
    for rank in range(RANKS):
        with as_rank(rank):
            model = _model()
            optimizer = _optimizer(model)
            receive = owned_receiver(optimizer, receiver)
            for name, parameter in model.named_parameters():
                receipt = receive(parameter, optimizer.param_groups[0], stored)
                assert receipt.kind == "AdamW"
                if receipt.tensors:
                    owners.setdefault(name, []).append(rank)
                receipt.attach({}, frozenset())
            owned = {id(slots.parameter) for slots in owned_slots(optimizer, slots_of)}
            names = {name for name, parameter in model.named_parameters() if id(parameter) in owned}
            assert names == {name for name, ranks in owners.items() if rank in ranks}
    assert {name: len(ranks) for name, ranks in owners.items()} == dict.fromkeys(
        dict(_model().named_parameters()), 1
    )


@pytest.mark.parametrize("initialised", [False, True])
def test_overlap_with_ddp_is_refused(initialised: bool) -> None:
    with as_rank(0):
        parameters = [nn.Parameter(torch.zeros(2))]
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
        if initialised:  # as after the first backward passes under DDP
            optimizer._overlap_info.params_per_rank = [parameters, [], []]
            optimizer._overlap_info.params_per_bucket = [parameters]
            optimizer._init_zero_for_overlap()
        for call in (
            lambda: owned_slots(optimizer, slots_of),
            lambda: owned_receiver(optimizer, lambda _: pytest.fail("called")),
        ):
            with pytest.raises(StructureError, match="overlap_with_ddp=False") as caught:
                call()
            assert ("_FunctionalAdamW" in str(caught.value)) == initialised


def test_a_load_without_the_optimizer_does_not_access_it() -> None:
    with as_rank(0):
        model = _model()
        optimizer = _optimizer(model)
        optimizer.optim = None  # as with overlap_with_ddp=True before the first backward passes
        tensors = {f"model.{name}": ("float32", tuple(item.shape)) for name, item in model.named_parameters()}
        binding = bind(
            {"model": model, "optimizer": optimizer},
            Catalogue(tensors, {}, {}, RANKS),
            selected=lambda key: key.startswith("model"),
        )
        assert [entry.key for entry in binding.tensors] == sorted(tensors)


def test_state_beside_the_parameters_is_refused() -> None:
    with as_rank(1):
        optimizer = _optimizer(_model())
        inner_optimizer(optimizer).state["calls"] = 3  # type: ignore[index]
        with pytest.raises(StructureError, match=r"AdamW .*\['calls'\]"):
            owned_slots(optimizer, slots_of)


def test_the_class_is_recognised_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_rank(0):
        optimizer = _optimizer(_model())
        assert is_zero_redundancy(optimizer)
        assert not is_zero_redundancy(optimizer.optim)
        monkeypatch.delitem(sys.modules, "torch.distributed.optim.zero_redundancy_optimizer")
        assert not is_zero_redundancy(optimizer)
        assert "torch.distributed.optim.zero_redundancy_optimizer" not in sys.modules


def test_every_rank_takes_the_masters_of_a_narrow_model() -> None:
    """All ranks hold the parameters. They would differ if only owners took the values of the masters."""
    narrow = _model().bfloat16()
    source = HybridDeviceOptimizer(
        narrow.parameters(), torch.optim.AdamW, master_dtype=torch.float32, lr=2.0**-10
    )
    _step(narrow, source)
    checkpoint = saved({"model": narrow, "optimizer": source})
    for rank in range(RANKS):
        with as_rank(rank):
            model = _model()
            checkpoint.load({"model": model, "optimizer": _optimizer(model)}, strict=False)
            for parameter, slots in zip(model.parameters(), source.describe_slots(), strict=True):
                assert torch.equal(parameter, slots.tensors["master"])  # type: ignore[arg-type]
