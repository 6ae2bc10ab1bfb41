"""State dicts of released Megatron-FSDP, described for torch's checkpoints without a collective."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interop.peer import PeerResult, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.processes, pytest.mark.timeout(900)]
SCRIPT = "uneven_chunks.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks" / "megatron_fsdp.md"
STAGES = [
    f"stage{stage}-{dtype}{words}"
    for stage in (1, 2, 3)
    for dtype in ("float32", "bfloat16")
    for words in ("", "-gated")
]
LAYOUTS = {
    2: STAGES,
    3: STAGES,
    4: [
        "stage3-bfloat16-hybrid",
        "stage3-bfloat16-outer",
        "stage3-float32-gated-hybrid",
        "stage2-float32-gated-ep",
        "stage3-bfloat16-tp",
        "stage1-bfloat16-gated-core",
    ],
}
SAVED = ["stage1-float32-gated", "stage2-bfloat16", "stage3-bfloat16-gated", "stage3-float32"]


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_computed_positions_are_those_that_megatron_fsdp_gathers(tmp_path: Path, ranks: int) -> None:
    """Of fused weights too, which Megatron-Core splits. Ranks with empty shards have fewer keys."""
    layouts = LAYOUTS[ranks]
    environment = "megatron_fsdp" if ranks == 4 else "megatron"  # hybrid shards need einops
    facts = run_peer(environment, SCRIPT, "equal", tmp_path, *layouts, nproc=ranks, timeout=600).facts
    for name in layouts:
        assert not facts[f"{name}.problems"]
        assert facts[f"{name}.ours"] == [{}] * ranks, "a collective ran"
        assert facts[f"{name}.theirs"], "the collectives of Megatron-FSDP are not counted"
        if ranks == 3:
            assert len(set(facts[f"{name}.parameters"])) > 1, "all ranks have the same keys"
    if ranks == 3:
        for name in ("stage3-bfloat16", "stage3-bfloat16-gated"):
            theirs = sum(facts[f"{name}.theirs"].values())
            assert re.search(rf"\| {theirs} \| 0 \|", PAGE.read_text()), (
                f"the table has not {theirs} for {name}"
            )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, PeerResult]]:
    """Checkpoints that `dcp.save` wrote on 2 and on 3 ranks, and the state that the ranks had."""
    found = {}
    for ranks in (2, 3):
        folder = tmp_path_factory.mktemp(f"dcp-{ranks}")
        found[ranks] = folder, run_peer("megatron", SCRIPT, "save", folder, *SAVED, nproc=ranks, timeout=300)
    return found


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (2, 3), (3, 2), (3, 1)])
def test_dcp_saves_and_loads_on_other_ranks(
    saved: dict[int, tuple[Path, PeerResult]], writers: int, readers: int
) -> None:
    """Bit for bit, and the training continues. The last rank describes its state once more, alone."""
    folder, before = saved[writers]
    after = run_peer("megatron", SCRIPT, "load", folder, *SAVED, nproc=readers, timeout=300)
    assert_same_tensors(after.tensors, before.tensors)
    for name in SAVED:
        # A sum of the gradients of other ranks is rounded otherwise, in bfloat16 too.
        bound = 0 if writers == readers else 2e-2 if "bfloat16" in name else 1e-5
        assert after.facts[f"{name}.losses"] == pytest.approx(
            before.facts[f"{name}.losses"], rel=bound, abs=0
        )


def test_wrong_use_says_what_to_change(tmp_path: Path) -> None:
    errors = run_peer("megatron", SCRIPT, "wrong", tmp_path, "stage3-float32-gated").facts
    name = "stage3-float32-gated"
    assert "optimizer.state.0.exp_avg: this DTensor belongs to no parameter" in errors[f"{name}.no optimizer"]
    assert "optimizer=OPTIMIZER" in errors[f"{name}.no optimizer"]
    assert "['fc9'] are no parameters" in errors[f"{name}.no such weight"]
    assert "cannot be split into {'a': 3, 'b': 4}" in errors[f"{name}.rows"]
    assert "has shape [11, 6]" in errors[f"{name}.shape"]
    assert "not the module inside" in errors[f"{name}.module"]
