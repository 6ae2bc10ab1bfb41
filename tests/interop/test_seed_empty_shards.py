"""Ranks with an empty shard run fewer collectives, and the save hangs: replayed with megatron-fsdp.

`preprocess_state_dict_for_uneven_dtensor` of megatron-fsdp 0.6.1 runs one `all_gather_object` for each
DTensor of a state dict. An optimizer that skips empty shards has fewer of them on such a rank.
(`fully_shard_optimizer` of that release adds the missing keys first; the state dict of Megatron-Core's own
optimizer does not.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardproof as sp
from tests.interop.peer import PeerTimedOut, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]
SCRIPT = "seed_empty_shards.py"


def test_the_description_of_uneven_shards_hangs(tmp_path: Path) -> None:
    with pytest.raises(PeerTimedOut) as caught:
        run_peer("megatron", SCRIPT, "own", tmp_path / "own", nproc=2, timeout=75)
    text = str(caught.value)
    assert "rank 0 describes 4 parameters" in text and "rank 1 describes 2 parameters" in text
    assert "rank 0 is back" not in text and "rank 1 is back" in text


def test_shardproof_saves_it(tmp_path: Path) -> None:
    step = tmp_path / "step"
    saved = run_peer("megatron", SCRIPT, "ours", step, nproc=2, timeout=240)
    with sp.open(step) as checkpoint:
        found = {key: checkpoint[key].read() for key in checkpoint if key.startswith("optim.")}
    assert_same_tensors(found, saved.tensors)
    assert len(found) == 8
