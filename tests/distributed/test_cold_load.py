"""Ranks of one node read past the page cache only the data that no other rank of the node reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.loading import LoadOptions, load_from
from shardproof.storage import LocalStorage
from tests.harness import rank, rendezvous, run_ranks, world_size

ROWS = 4096


class ColdStorage(LocalStorage):
    """Reports an empty page cache, and counts the bytes read past it and through it."""

    past = through = 0

    def is_cached(self, name: str, start: int, count: int) -> bool:
        return False

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.through += len(buffer)
        super().read_into(name, start, buffer)

    def read_uncached(self, name: str, start: int, count: int, memory: memoryview) -> memoryview:
        self.past += count
        return super().read_uncached(name, start, count, memory)


def load(folder: str, replicas: bool) -> tuple[int, int]:
    """Loads half of the rows, or all rows. Returns the bytes read past and through the page cache."""
    storage, whole = ColdStorage(folder), torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64)
    height = ROWS // world_size()
    mine = whole if replicas else whole[rank() * height : (rank() + 1) * height]
    target = torch.zeros_like(mine)
    state = {"w": target if replicas else sp.LocalShards(whole.shape, [(target, (rank() * height, 0))])}
    load_from(storage, state, rendezvous(deadline=20.0), LoadOptions())
    assert torch.equal(target, mine)
    return storage.past, storage.through


@pytest.mark.parametrize("replicas", [False, True])
def test_replicas_of_a_node_read_through_its_page_cache(tmp_path: Path, replicas: bool) -> None:
    sp.save(tmp_path, {"w": torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64)})
    for outcome in run_ranks(2, load, str(tmp_path), replicas):
        past, through = outcome.value
        assert (past == 0) == replicas and (through == 0) != replicas
