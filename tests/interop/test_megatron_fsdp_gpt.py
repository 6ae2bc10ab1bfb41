"""Every option of the CPU offload on: a GPT of Megatron-Core on Megatron-FSDP, its optimizer on the CPU.

The model, its wrapper and the optimizer are what released Megatron-Core makes of these options.
`peers/train_megatron_fsdp_gpt.py` names the options, and what stands for CUDA.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.interop.peer import PeerResult, assert_same_tensors, python_of, run_peer

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


@pytest.mark.parametrize(
    ("saved_as", "writers", "loaded_as", "readers"),
    [
        pytest.param("stage3-ep", 2, "stage2-moe-pin", 1, id="experts_to_one_rank"),
        pytest.param("stage2-moe", 3, "stage3-ep-pin", 2, id="experts_from_three_ranks"),
        pytest.param("stage3-pin", 1, "stage2-tp", 2, id="to_tensor_parallel"),
        pytest.param("stage1-tp", 2, "stage3-pin", 3, id="from_tensor_parallel"),
    ],
)
def test_experts_and_tensor_parallel_weights_of_megatron_core(
    saved_as: str, writers: int, loaded_as: str, readers: int, tmp_path: Path
) -> None:
    """Megatron-Core makes the layers, and the meshes of dense and of expert weights. Layouts are declared."""
    before = run_peer(ENVIRONMENT, SCRIPT, "save", tmp_path, f"case:{saved_as}", nproc=writers, timeout=300)
    after = run_peer(ENVIRONMENT, SCRIPT, "load", tmp_path, f"case:{loaded_as}", nproc=readers, timeout=300)
    assert_same_tensors(after.tensors, before.tensors)
    losses = before.facts["case.losses"]
    assert after.facts["case.losses"] == pytest.approx(losses, rel=2e-2, abs=0)  # bfloat16, see above


def test_undeclared_layouts_are_refused(tmp_path: Path) -> None:
    cases = ["stage3-ep-undeclared", "stage3-tp-undeclared"]
    facts = run_peer(ENVIRONMENT, SCRIPT, "undeclared", tmp_path, *cases, nproc=2).facts
    assert "shardproof.layouts.experts.sequential" in facts[cases[0]]
    assert "shardproof.layouts.swiglu(MODULE, NAME, SIZE, rank=RANK, ranks=RANKS)" in facts[cases[1]]
    for case in cases:  # Megatron-Core has a copy of the package
        assert "whose state_dict is a collective" in facts[f"{case}.whole"]


@pytest.mark.gpu
def test_fp8_weights_of_transformer_engine_are_refused(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("fp8 weights need a GPU of CUDA")
    engine = [python_of(ENVIRONMENT), "-c", "import transformer_engine"]
    if subprocess.run(engine, capture_output=True).returncode:
        pytest.skip(f"fp8 weights need transformer_engine in {ENVIRONMENT}, which is built for a CPU")
    facts = run_peer(ENVIRONMENT, SCRIPT, "undeclared", tmp_path, "stage3-fp8").facts
    assert "is stored in fp8" in facts["stage3-fp8"]


def test_numbers_of_experts_on_a_rank_are_refused_for_torch(tmp_path: Path) -> None:
    """Megatron-Core's function renames them in `save` and `load_dcp`, as the error says, and nothing is lost.

    Rank 0 cannot tell: its experts have the same numbers in the whole model.
    """
    errors = run_peer(ENVIRONMENT, SCRIPT, "local_names", tmp_path, "x:stage3-ep", nproc=2).facts["x"]
    assert errors[0] == ""
    assert "In the whole model it is decoder.layers.0.mlp.experts.local_experts.2." in errors[1]
    assert "handle_experts_in_state_dict(STATE_DICT, NUM_EXPERTS) first" in errors[1]
    before = run_peer(ENVIRONMENT, SCRIPT, "save", tmp_path, "x:stage3-ep", nproc=2, timeout=300)
    for case, ranks in (("x:stage3-ep", 2), ("x:stage3-moe", 1)):
        after = run_peer(ENVIRONMENT, SCRIPT, "load_dcp", tmp_path, case, nproc=ranks, timeout=300)
        assert_same_tensors(after.tensors, before.tensors)
