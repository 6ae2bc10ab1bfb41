"""Ranks that meet their parameters in different orders, and a rank that lacks a slot the others have.

Elsewhere ranks walked their own optimizer state and called one collective for each entry. Dictionaries in
different orders exchanged bytes of different tensors; one entry less on one rank, and its peers waited in a
gather until the watchdog ended the job. Here no order matters that is free, and a slot that one rank lacks is
either absent for all or refused on all with one error, whether that rank holds elements of the parameter or
none. The next valid save is not held up by it.
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
from tests.scenarios.states import Said, agreed, attempt

RANKS = 3

SETUPS = [
    Setup("fsdp2"),
    Setup("fsdp2", "hybrid", 0.5),
    Setup("flat all", "hybrid", 0.5, bf16=True),
    Setup("none", "distributed hybrid", 0.5, bf16=True),
]
MORE = [
    Setup("flat all"),
    Setup("none", "distributed"),
    *(Setup(f"flat {strategy}", "hybrid", 0.5) for strategy in ("optimizer_gradients", "optimizer", "none")),
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
    """All that is free gets another order: registration, groups' parameters, state and its slots."""
    for module in job.net.modules():
        _shuffle(module._parameters, order)
        if not isinstance(module, nn.ModuleList):  # that order is the forward's
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


def shuffled_life(root: str, setup: Setup) -> dict[str, Any]:
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
def test_no_free_order_matters(setup: Setup, tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, shuffled_life, str(tmp_path), setup, timeout=120)
    assert [outcome.value for outcome in outcomes] == [{}] * RANKS


@contextmanager
def lacking(job: Job, name: str, slots: Collection[str]) -> Iterator[None]:
    """The optimizer keeps nothing in these slots of a parameter, while this lasts."""
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


def lacking_life(root: str, setup: Setup) -> dict[str, Said]:
    """Rank 1 lacks a slot, or all, of a parameter; after each such save comes one of everything."""
    said = {}
    with Worlds(RANKS) as worlds:
        job = Job(setup, worlds, RANKS)
        job.train(0, 2)
        for name in (HELD, SMALL):
            for slots in (["exp_avg"], ["exp_avg", "exp_avg_sq", "step", "master"]):
                at = f"{name} without {len(slots)}"
                save = partial(sp.save, f"{root}/{at}", job.state, rendezvous=job.meeting)
                with lacking(job, name, slots) if rank() == 1 else nullcontext(), no_collectives():
                    said[at] = attempt(save)
                said[at].value = None
                job.save(f"{root}/{at}, then whole")
    return said


@pytest.mark.parametrize("setup", ENTRIES, ids=str)
def test_a_slot_that_one_rank_lacks_is_absent_or_refused_alike(setup: Setup, tmp_path: Path) -> None:
    values = [outcome.value for outcome in run_ranks(RANKS, lacking_life, str(tmp_path), setup, timeout=120)]
    for at in values[0]:
        said = agreed([value[at] for value in values])
        name, _, _ = at.partition(" ")
        whole = content(str(tmp_path / f"{at}, then whole"))
        assert f"optimizer.{name}.exp_avg" in whole
        if said.kind:
            assert said.kind in ("StructureError", "TilingError")
            assert f"optimizer.{name}" in said.text
            assert not (tmp_path / at).exists() or not any((tmp_path / at).iterdir())
        else:  # no element was that rank's to give: what is stored is whole
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
    """In place: a module's dictionaries are known to others."""
    keys = list(items)
    order.shuffle(keys)
    for key in keys:
        items[key] = items.pop(key)
