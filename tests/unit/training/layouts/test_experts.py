"""Experts in four forms, with a fused SwiGLU inside, converted into each other on load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardproof.errors import StructureError
from shardproof.layouts import experts, rename, swiglu
from shardproof.state import collect
from tests.unit.training.layouts.reference import checkpoint_of, linear, numbered

TOTAL, WIDTH, HIDDEN = 4, 3, 4
FC1 = numbered(TOTAL, 2 * HIDDEN, WIDTH)
"""Gate and up projection of each expert, as (out, in)."""
FC2 = numbered(TOTAL, WIDTH, HIDDEN) + 1000
BIAS = numbered(TOTAL, 2 * HIDDEN) + 2000


class ExpertShards:
    """The shards that one rank has of its experts, cut by hand."""

    def __init__(self, rank: int, expert_ranks: int, ranks: int) -> None:
        expert_rank, self.rank = divmod(rank, ranks)
        self.ranks, self.count = ranks, TOTAL // expert_ranks
        self.first = expert_rank * self.count
        here = slice(self.first, self.first + self.count)
        self.fc1, self.bias = (
            torch.cat([part.chunk(ranks, 1)[self.rank] for part in full[here].chunk(2, 1)], 1)
            for full in (FC1, BIAS)
        )
        self.fc2 = FC2[here].chunk(ranks, 2)[self.rank]

    @property
    def cut_of_expert(self) -> dict[str, int]:
        return {"rank": self.rank, "ranks": self.ranks}

    @property
    def place(self) -> dict[str, int]:
        return {"first": self.first, "total": TOTAL}


def sequential(own: ExpertShards) -> torch.nn.Module:
    model = torch.nn.Module()
    model.local_experts = torch.nn.ModuleList()
    for fc1, fc2, bias in zip(own.fc1, own.fc2, own.bias, strict=True):
        expert = torch.nn.Module()
        expert.fc1, expert.fc2 = linear(fc1, bias), linear(fc2)
        swiglu(expert, "fc1.weight", HIDDEN, **own.cut_of_expert)
        swiglu(expert, "fc1.bias", HIDDEN, **own.cut_of_expert)
        _cut_columns(expert, own)
        model.local_experts.append(expert)
    experts.sequential(model.local_experts, **own.place)
    rename(model.local_experts, "")
    return model


def _cut_columns(module: torch.nn.Module, own: ExpertShards, name: str = "fc2.weight") -> None:
    from shardproof.layouts import fused

    fused(module, name, (HIDDEN,), dim=1, **own.cut_of_expert)


def numbered_parameters(own: ExpertShards) -> torch.nn.Module:
    model = torch.nn.Module()
    model.fc1, model.fc2 = torch.nn.Module(), torch.nn.Module()
    for number in range(own.count):
        for layer, name, tensor in (
            (model.fc1, "weight", own.fc1[number]),
            (model.fc1, "bias", own.bias[number]),
            (model.fc2, "weight", own.fc2[number]),
        ):
            setattr(layer, f"{name}{number}", torch.nn.Parameter(tensor.clone()))
        for name in ("weight", "bias"):
            swiglu(model.fc1, f"{name}{number}", HIDDEN, **own.cut_of_expert)
        _cut_columns(model, own, f"fc2.weight{number}")
    for name in ("fc1.weight", "fc1.bias", "fc2.weight"):
        experts.numbered(model, name, **own.place)
    return model


def stacked(own: ExpertShards) -> torch.nn.Module:
    """w1 as (in, out), w2 as (out, in)."""
    model = torch.nn.Module()
    model.w1 = torch.nn.Parameter(own.fc1.transpose(1, 2).contiguous())
    model.b1 = torch.nn.Parameter(own.bias.clone())
    model.w2 = torch.nn.Parameter(own.fc2.clone())
    gate_up = {"parts": (HIDDEN, HIDDEN), **own.cut_of_expert, **own.place}
    experts.stacked(model, "w1", transposed=True, key="fc1.weight", dim=1, **gate_up)
    experts.stacked(model, "b1", key="fc1.bias", **gate_up)
    experts.stacked(model, "w2", key="fc2.weight", parts=(HIDDEN,), dim=-1, **own.cut_of_expert, **own.place)
    return model


def grouped(own: ExpertShards) -> torch.nn.Module:
    """(in, experts * out) and (experts * in, out)."""
    model = torch.nn.Module()
    model.weight1 = torch.nn.Parameter(torch.cat([fc1.t() for fc1 in own.fc1], 1))
    model.bias1 = torch.nn.Parameter(own.bias.flatten())
    model.weight2 = torch.nn.Parameter(torch.cat([fc2.t() for fc2 in own.fc2]))
    gate_up = {"count": own.count, "parts": (HIDDEN, HIDDEN), **own.cut_of_expert, **own.place}
    experts.grouped(model, "weight1", along=1, transposed=True, key="fc1.weight", dim=1, **gate_up)
    experts.grouped(model, "bias1", along=0, key="fc1.bias", **gate_up)
    experts.grouped(
        model,
        "weight2",
        along=0,
        count=own.count,
        transposed=True,
        key="fc2.weight",
        parts=(HIDDEN,),
        dim=0,
        **own.cut_of_expert,
        **own.place,
    )
    return model


FORMS: list[Callable[[ExpertShards], torch.nn.Module]] = [sequential, numbered_parameters, grouped, stacked]


def state_of(form: Callable[[ExpertShards], torch.nn.Module], own: ExpertShards) -> dict[str, Any]:
    """A model and an AdamW that made three steps with gradients equal to the weights."""
    model = form(own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, betas=(0.5, 0.5))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    for _ in range(3):
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("expert_ranks", "ranks"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_every_form_is_saved_as_the_whole_model(
    form: Callable[[ExpertShards], torch.nn.Module], expert_ranks: int, ranks: int
) -> None:
    owns = [ExpertShards(rank, expert_ranks, ranks) for rank in range(expert_ranks * ranks)]
    full = checkpoint_of([state_of(form, own) for own in owns]).full
    for name, expected in (("fc1.weight", FC1), ("fc1.bias", BIAS), ("fc2.weight", FC2)):
        assert torch.equal(full[f"model.{name}"], expected)
        assert torch.equal(full[f"optimizer.{name}.exp_avg"], 0.875 * expected)
        assert torch.equal(full[f"optimizer.{name}.step"], torch.full((TOTAL,), 3.0))


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
def test_every_form_loads_into_every_other(
    saved: Callable[[ExpertShards], torch.nn.Module], loaded: Callable[[ExpertShards], torch.nn.Module]
) -> None:
    checkpoint = checkpoint_of([state_of(saved, ExpertShards(rank, 2, 1)) for rank in range(2)])
    for rank in range(4):
        own = ExpertShards(rank, 2, 2)
        expected, state = state_of(loaded, own), state_of(loaded, own)
        with torch.no_grad():
            for parameter, slots in state["optimizer"].state.items():
                for tensor in (parameter, *slots.values()):
                    tensor.zero_()
        checkpoint.load(state)
        pairs = zip(state["model"].parameters(), expected["model"].parameters(), strict=True)
        for got, wanted in pairs:
            assert torch.equal(got, wanted)
            for slot, value in expected["optimizer"].state[wanted].items():
                assert torch.equal(state["optimizer"].state[got][slot], value), slot
        fresh = loaded(own)
        optimizer = torch.optim.AdamW(fresh.parameters())
        checkpoint.load({"model": fresh, "optimizer": optimizer})
        for got, wanted in zip(fresh.parameters(), expected["model"].parameters(), strict=True):
            for slot, value in expected["optimizer"].state[wanted].items():
                assert torch.equal(optimizer.state[got][slot], value), slot


def test_step_counts_that_differ_do_not_become_one() -> None:
    state = state_of(sequential, ExpertShards(0, 1, 1))
    state["optimizer"].state[state["model"].local_experts[1].fc2.weight]["step"].fill_(2.0)
    checkpoint = checkpoint_of([state])
    again = state_of(sequential, ExpertShards(0, 1, 1))
    checkpoint.load(again)
    assert again["optimizer"].state[again["model"].local_experts[1].fc2.weight]["step"] == 2.0
    with pytest.raises(
        StructureError, match=r"fc2.weight.step: .* \[3.0, 2.0, 3.0, 3.0\] for experts that share"
    ):
        checkpoint.load(state_of(stacked, ExpertShards(0, 1, 1)))


def test_extra_state_of_an_expert_keeps_its_number() -> None:
    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self) -> int:
            return self.seen

        def set_extra_state(self, state: int) -> None:
            self.seen = state

    def local(first: int) -> torch.nn.ModuleList:
        made = torch.nn.ModuleList([Counting(2, 2) for _ in range(2)])
        experts.sequential(made, first=first, total=4)
        return made

    stage = local(2)
    stage[1].seen = 5
    collected = collect(stage)
    assert [item.key for item in collected.objects] == ["2._extra_state", "3._extra_state"]
    assert [entry.key for entry in collected.tensors] == ["bias", "weight"]
    target = local(2)
    checkpoint_of([local(0), stage]).load(target, exact=False)
    assert [part.seen for part in target] == [0, 5]


def test_options_that_differ_between_experts_are_refused() -> None:
    model = sequential(ExpertShards(0, 1, 1))
    first, *others = model.local_experts
    groups = [
        {"params": list(first.parameters()), "lr": 0.5},
        {"params": [p for other in others for p in other.parameters()]},
    ]
    with pytest.raises(
        StructureError, match=r"have the same key 'optimizer.fc1.weight.@options', but differ"
    ):
        collect({"model": model, "optimizer": torch.optim.AdamW(groups)})


def test_experts_of_different_shapes_are_refused() -> None:
    odd = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)])
    experts.sequential(odd)
    with pytest.raises(
        StructureError, match=r"'weight', but are tensor float32 \[2, 2, 2\] and .* \[2, 3, 2\]"
    ):
        collect(odd)


def test_numbers_and_sizes_that_do_not_fit_are_refused() -> None:
    local = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
    with pytest.raises(StructureError, match="2 experts from number 3 on exceed a total of 4"):
        experts.sequential(local, first=3, total=4)
    experts.sequential(local, first=2, total=4)
    with pytest.raises(StructureError, match="already belongs to an expert"):
        experts.sequential(local, first=0, total=4)
    module = torch.nn.Linear(6, 4)
    with pytest.raises(StructureError, match=r"shape \[4, 6\], which is not 4 experts side by side along 1"):
        experts.grouped(module, "weight", count=4, along=1)
    with pytest.raises(StructureError, match="no such parameter or buffer"):
        experts.numbered(module, "weight")
    with pytest.raises(StructureError, match="transposed=True needs matrices"):
        experts.stacked(module, "bias", transposed=True)
    with pytest.raises(StructureError, match=r"with 6 elements .* need 2 for"):
        experts.stacked(module, "weight", parts=(2, 2), ranks=2)
