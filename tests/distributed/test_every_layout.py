"""A checkpoint of any layout on 1 to 4 ranks loads into any other layout, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from tests.distributed.layouts import LAYOUTS, Meshes, global_tensors, local_values, meetings_of_first_ranks
from tests.harness import process_group, rank, run_ranks, world_size

SLOTS = {"weight": 1.0, "exp_avg": 0.5, "exp_avg_sq": -0.25}


def _state(layout: str, n: int, meshes: Meshes) -> dict[str, Any]:
    """The model's tensors, and slots of an optimizer with values of their own."""
    return {slot: LAYOUTS[layout](global_tensors(scale), rank(), n, meshes) for slot, scale in SLOTS.items()}


def _blank(state: dict[str, Any]) -> None:
    for tensors in state.values():
        for value in tensors.values():
            for memory in local_values(value):
                memory.fill_(-7)


def _differs(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Keys whose memory is not bit for bit the expected one."""
    wrong = []
    for slot, tensors in expected.items():
        assert tensors.keys() == state[slot].keys()
        for name, value in tensors.items():
            pairs = zip(local_values(state[slot][name]), local_values(value), strict=True)
            if not all(torch.equal(found, wanted) for found, wanted in pairs):
                wrong.append(f"{slot}.{name}")
    return wrong


def save_and_load_pairs(folder: str, every: int) -> tuple[int, list[str]]:
    """Saves every layout on every number of ranks, then loads every n-th of them into each."""
    problems: list[str] = []
    pairs = 0
    with process_group(), meetings_of_first_ranks() as meetings:
        meshes = Meshes(world_size())
        sizes = range(1, world_size() + 1)
        cases = [(layout, n) for layout in LAYOUTS for n in sizes]
        for layout, n in cases:
            state = _state(layout, n, meshes)
            if rank() < n:
                sp.save(f"{folder}/{layout}-{n}", state, rendezvous=meetings[n])
        torch.distributed.barrier()
        for number, (layout, n) in enumerate(cases):
            target, expected = _state(layout, n, meshes), _state(layout, n, meshes)
            if rank() >= n:
                continue
            for source, m in cases[number % every :: every]:
                _blank(target)
                sp.load(f"{folder}/{source}-{m}", target, rendezvous=meetings[n])
                pairs += 1
                problems += [
                    f"{source} on {m} to {layout} on {n}: {key}" for key in _differs(target, expected)
                ]
    return pairs, problems


@pytest.mark.timeout(400)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_pair_of_layouts(every: int, tmp_path: Path) -> None:
    outcomes = run_ranks(4, save_and_load_pairs, str(tmp_path), every, timeout=380)
    cases = len(LAYOUTS) * 4
    assert [outcome.value[1] for outcome in outcomes] == [[]] * 4
    assert outcomes[0].value[0] == sum(len(range(number % every, cases, every)) for number in range(cases))
