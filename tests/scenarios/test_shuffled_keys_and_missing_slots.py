"""Ranks that meet their parameters in different orders, and a rank that lacks a slot the others have.

Elsewhere ranks walked their own optimizer state and called one collective for each entry. Dictionaries in
different orders exchanged bytes of different tensors; one entry less on one rank, and its peers waited in a
gather until the watchdog ended the job. Here no free order matters. A slot that one rank lacks is absent for
all ranks, or all ranks refuse it with one error. This holds whether or not that rank has elements of the
parameter. The next valid save works.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardproof as sp
from shardproof.state import ParameterSlots, SlotProvider, slots_of
from tests.harness import rank, run_ranks
from tests.scenarios.collectives import no_collectives
from tests.scenarios.jobs import Job, Setup, Worlds, content, unequal
from tests.scenarios.states import CallResult, attempt, same_on_all_ranks

RANKS = 3

SETUPS = [
    Setup("fsdp2"),
    Setup("flat all", "hybrid", 0.5, bf16=True),
    Setup("none", "distributed hybrid", 0.5, bf16=True),
]
MORE = [
    Setup("fsdp2", "hybrid", 0.5),
    Setup("flat all"),
    Setup("none", "distributed"),
    Setup("flat optimizer_gradients", "hybrid", 0.5),
    *(Setup("fsdp2", "hybrid", fraction, bf16=True) for fraction in (0.0, 1.0)),
    Setup("none", "hybrid", 0.5),
    Setup("none", "distributed hybrid", 1.0),
    Setup("none", "distributed", bf16=True),
]

ENTRIES = [*SETUPS, *(pytest.param(setup, marks=pytest.mark.slow) for setup in MORE)]

HELD = "blocks.0.mlp.fc1.weight"
"""Every rank holds elements of it."""
SMALL = "blocks.1.mlp_gain.weight"
"""One element: at most one rank holds any where parameters are sharded."""


def shuffle(job: Job, order: random.Random) -> None:
    """Changes every free order: of registration, of groups' parameters, of state and of its slots."""
    for module in job.net.modules():
        _shuffle(module._parameters, order)
        if not isinstance(module, nn.ModuleList):  # the forward depends on that order
            _shuffle(module._modules, order)
    if isinstance(job.optimizer, SlotProvider):
        describe = type(job.optimizer).describe_slots

        def described() -> list[ParameterSlots]:
            slots = list(describe(job.optimizer))
            order.shuffle(slots)
            return [replace(one, tensors=_shuffled(one.tensors, order)) for one in slots]

        job.optimizer.describe_slots = described
    else:
        _shuffle(job.optimizer.state, order)
        for slots in job.optimizer.state.values():
            _shuffle(slots, order)
        for group in job.optimizer.param_groups:
            order.shuffle(group["params"])


def train_and_save_shuffled(root: str, setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {}
    order = random.Random(rank())
    with Worlds(RANKS) as worlds:
        straight = Job(setup, worlds, RANKS)
        job = Job(setup, worlds, RANKS, order=order)
        checkpointer = sp.Checkpointer(f"{root}/shuffled", rendezvous=job.meeting)
        orders = set()
        for step in range(3):
            straight.train(step, step + 1)
            job.train(step, step + 1)
            shuffle(job, order)
            orders.add(tuple(name for name, _ in job.net.named_parameters()))
            straight.save(f"{root}/straight {step}")
            with no_collectives():
                checkpointer.save(step, _shuffled(job.state | {"epoch": step}, order)).result()
            if rank() == 0:
                stored = content(f"{root}/shuffled/step-{step:08d}")
                assert stored.pop("epoch") == step
                found[f"{step}: stored"] = unequal(stored, content(f"{root}/straight {step}"))
        again = Job(setup, worlds, RANKS, seed=2, order=order)
        shuffle(again, order)
        with no_collectives():
            checkpointer.restore(_shuffled(again.state | {"epoch": None}, order))
        found["losses"] = again.train(3, 6) != straight.train(3, 6)
        found["trained on"] = unequal(again.memory(), straight.memory())
        found["orders"] = len(orders) != 3
    return {aspect: wrong for aspect, wrong in found.items() if wrong}


@pytest.mark.parametrize("setup", ENTRIES, ids=str)
def test_a_save_is_the_same_in_any_order_of_keys_and_slots(setup: Setup, tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, train_and_save_shuffled, str(tmp_path), setup, timeout=120)
    assert [outcome.value for outcome in outcomes] == [{}] * RANKS


@contextmanager
def lacking(job: Job, name: str, slots: Collection[str]) -> Iterator[None]:
    """Within it, the optimizer has nothing in these slots of a parameter."""
    parameter, optimizer = job.net.get_parameter(name), job.optimizer
    if isinstance(optimizer, SlotProvider):
        whole = slots_of(optimizer)
        described = [_without(one, slots) if one.parameter is parameter else one for one in whole]
        optimizer.describe_slots = lambda: described
        yield
        del optimizer.describe_slots
    else:
        whole = optimizer.state[parameter]
        optimizer.state[parameter] = {slot: item for slot, item in whole.items() if slot not in slots}
        yield
        optimizer.state[parameter] = whole


def save_with_lacking_slots(root: str, setup: Setup) -> dict[str, CallResult]:
    """Rank 1 lacks one slot or all slots of a parameter. A save of everything follows each such save."""
    results = {}
    with Worlds(RANKS) as worlds:
        job = Job(setup, worlds, RANKS)
        job.train(0, 2)
        for name in (HELD, SMALL):
            for slots in (["exp_avg"], ["exp_avg", "exp_avg_sq", "step", "master"]):
                at = f"{name} without {len(slots)}"
                save = partial(sp.save, f"{root}/{at}", job.state, rendezvous=job.meeting)
                with lacking(job, name, slots) if rank() == 1 else nullcontext(), no_collectives():
                    results[at] = attempt(save)
                results[at].value = None
                job.save(f"{root}/{at}, then whole")
    return results


@pytest.mark.parametrize("setup", ENTRIES, ids=str)
def test_a_slot_that_one_rank_lacks_is_absent_or_refused_alike(setup: Setup, tmp_path: Path) -> None:
    values = [
        outcome.value
        for outcome in run_ranks(RANKS, save_with_lacking_slots, str(tmp_path), setup, timeout=120)
    ]
    for at in values[0]:
        result = same_on_all_ranks([value[at] for value in values])
        name, _, _ = at.partition(" ")
        whole = content(str(tmp_path / f"{at}, then whole"))
        assert f"optimizer.{name}.exp_avg" in whole
        if result.kind:
            assert result.kind in ("StructureError", "TilingError")
            assert f"optimizer.{name}" in result.text
            assert not (tmp_path / at).exists() or not any((tmp_path / at).iterdir())
        else:  # that rank has no element of it: the stored tensor is whole
            assert name == SMALL
            assert unequal(content(str(tmp_path / at)), whole) == []


def _without(one: ParameterSlots, slots: Collection[str]) -> ParameterSlots:
    return replace(
        one,
        tensors={slot: item for slot, item in one.tensors.items() if slot not in slots},
        values={slot: item for slot, item in one.values.items() if slot not in slots},
    )


def _shuffled(items: Mapping[str, Any], order: random.Random) -> dict[str, Any]:
    keys = list(items)
    order.shuffle(keys)
    return {key: items[key] for key in keys}


def _shuffle(items: dict[Any, Any], order: random.Random) -> None:
    """In place: other objects refer to a module's dictionaries."""
    keys = list(items)
    order.shuffle(keys)
    for key in keys:
        items[key] = items.pop(key)
