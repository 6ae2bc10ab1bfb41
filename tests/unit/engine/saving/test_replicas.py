"""Digests of replicated boxes cover the elements in row-major order, whatever their memory layout."""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from shardproof.engine.planning import RankPlan, Structure, plan_writes
from shardproof.engine.saving.replica_check import chosen_slices, hash_replicas
from shardproof.engine.saving.staging import StagingPool
from shardproof.state import collect
from shardproof.storage import aligned_buffer
from tests.accelerator import first_device

TENSORS: dict[str, torch.Tensor] = {
    "whole": torch.arange(300.0).reshape(30, 10),
    "turned": torch.arange(300.0).reshape(10, 30).t(),
    "strided": torch.arange(400, dtype=torch.int16).reshape(20, 20)[::2, 1::3],
    "conjugated": torch.complex(torch.ones(40), torch.arange(40.0)).conj(),
    "negated": torch.complex(torch.ones(40), torch.arange(40.0)).conj().imag,
    "broadcast": torch.arange(6.0).expand(40, 6),
    "half": torch.full((50,), 2.5, dtype=torch.bfloat16),
    "bits": torch.tensor([True, False] * 40),
    "scalar": torch.tensor(4.5, requires_grad=True),
    "not a number": torch.full((20,), float("nan")),
}


def hashed(state: dict[str, Any], sample_bytes: int, turn: int | None) -> list[tuple[str, int, int, bytes]]:
    """Key, first element, bytes and digest of each slice, as a rank of two would hash them."""
    collected = collect(state, rank=0, world_size=1)
    structure = Structure.of(collected)
    plan = plan_writes([structure, structure], sample_bytes=sample_bytes)
    part = RankPlan.decode(plan.rank_plans()[0].encode())
    slices = part.shared.slices(structure)
    rows = chosen_slices(slices, part.shared.turns, turn)
    pieces = [(piece, entry.key) for entry in collected.tensors for piece in entry.pieces]
    done: list[int] = []
    views = [piece for piece, _ in pieces]
    digests = hash_replicas(views, slices, rows, StagingPool(0, aligned_buffer), done.append)
    assert done == np.cumsum(slices.byte_count[rows]).tolist()
    return [
        (
            pieces[int(slices.box[row])][1],
            int(slices.start[row]),
            int(slices.byte_count[row]),
            digests[16 * at : 16 * at + 16],
        )
        for at, row in enumerate(rows.tolist())
    ]


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("sample_bytes", [64, 400, 1 << 20])
def test_every_layout_is_hashed_in_row_major_order(sample_bytes: int) -> None:
    found = hashed(TENSORS, sample_bytes, None)
    covered = dict.fromkeys(TENSORS, 0)
    for key, start, count, digest in found:
        tensor = TENSORS[key]
        begin = start * tensor.element_size()
        assert begin == covered[key]
        covered[key] += count
        assert digest == xxhash.xxh3_128_digest(bytes_of(tensor)[begin : begin + count]), (key, start)
    assert covered == {key: tensor.numel() * tensor.element_size() for key, tensor in TENSORS.items()}


def test_equal_elements_have_equal_digests_in_every_layout() -> None:
    plain = {
        key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in TENSORS.items()
    }
    plain = {key: tensor.resolve_conj().resolve_neg() for key, tensor in plain.items()}
    assert hashed(plain, 200, None) == hashed(TENSORS, 200, None)


def test_one_bit_changes_one_digest() -> None:
    state = {key: tensor.detach().clone() for key, tensor in TENSORS.items()}
    before = hashed(state, 400, None)
    state["turned"].view(torch.int32)[7, 3] ^= 1 << 9
    after = hashed(state, 400, None)
    changed = [(was, is_) for was, is_ in zip(before, after, strict=True) if was != is_]
    assert [was[:3] for was, _ in changed] == [is_[:3] for _, is_ in changed]
    ((key, start, count, _), _), *rest = changed
    assert not rest
    assert key == "turned"
    assert start <= 7 * 10 + 3 < start + count // 4


def test_signs_of_zero_differ_and_nan_equals_itself() -> None:
    zeros = hashed({"w": torch.zeros(4)}, 64, None)
    assert hashed({"w": -torch.zeros(4)}, 64, None) != zeros
    nans = {"w": torch.full((4,), float("nan"))}
    assert hashed(nans, 64, None) == hashed(nans, 64, None)


def test_the_turns_together_hash_every_slice_once() -> None:
    state = {"w": torch.arange(1000.0)}
    every = hashed(state, 400, None)
    turns = [hashed(state, 400, turn) for turn in range(13)]
    assert sorted(chain.from_iterable(turns)) == sorted(every)
    assert hashed(state, 400, 13 * 10**9 + 2) == turns[2]


def test_hashing_keeps_no_reference_to_the_state() -> None:
    tensor = torch.zeros(1000)
    before = gc.get_referrers(tensor)
    hashed({"w": tensor}, 400, None)
    gc.collect()
    assert len(gc.get_referrers(tensor)) == len(before)
    assert np.count_nonzero(tensor.numpy()) == 0


@pytest.mark.gpu
def test_device_memory_has_the_digests_of_host_memory() -> None:
    there = {key: tensor.detach().to(first_device()) for key, tensor in TENSORS.items()}
    assert hashed(there, 400, None) == hashed(TENSORS, 400, None)
