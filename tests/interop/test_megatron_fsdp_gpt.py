"""Every option of the CPU offload on: a GPT of Megatron-Core on Megatron-FSDP, its optimizer on the CPU.

The model, its wrapper and the optimizer are what released Megatron-Core makes of these options.
`peers/train_megatron_fsdp_gpt.py` names the options, and what stands for CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.peer import PeerResult, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.processes, pytest.mark.timeout(900)]
ENVIRONMENT, SCRIPT = "megatron_fsdp", "train_megatron_fsdp_gpt.py"
CASES = ["stage3-pin", "stage2", "stage1-pin"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, PeerResult]]:
    """Checkpoints of shardproof and of torch, by 2 and by 3 ranks, and the state that the ranks had."""
    found = {}
    for ranks in (2, 3):
        folder = tmp_path_factory.mktemp(f"gpt-{ranks}")
        found[ranks] = folder, run_peer(ENVIRONMENT, SCRIPT, "save", folder, *CASES, nproc=ranks, timeout=300)
    return found


@pytest.mark.parametrize("how", ["load", "load_dcp"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (2, 3), (3, 2), (3, 1)])
def test_state_and_training_continue(
    saved: dict[int, tuple[Path, PeerResult]], writers: int, readers: int, how: str
) -> None:
    """Through shardproof, and through torch with Megatron-Core's own state dict, described by shardproof."""
    folder, before = saved[writers]
    after = run_peer(ENVIRONMENT, SCRIPT, how, folder, *CASES, nproc=readers, timeout=300)
    assert_same_tensors(after.tensors, before.tensors)
    for name in CASES:
        # A sum of the gradients of other ranks is rounded otherwise, in bfloat16.
        bound = 0 if writers == readers else 2e-2
        losses = before.facts[f"{name}.losses"]
        assert after.facts[f"{name}.losses"] == pytest.approx(losses, rel=bound, abs=0), name


def test_the_released_optimizer_fails_in_its_first_step(tmp_path: Path) -> None:
    error = run_peer(ENVIRONMENT, SCRIPT, "released", tmp_path, "stage3", nproc=2).facts["released"]
    assert "mixed torch.Tensor and DTensor" in error
