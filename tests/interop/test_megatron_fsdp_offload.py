"""Megatron-FSDP with optimizers that step on the CPU: Megatron-Core's HybridDeviceOptimizer and shardproof's.

The packages are the released ones. `peers/cpu_stubs.py` and `peers/offload_stubs.py` say what stands for CUDA
and for the device. Copies on side streams and pinned memory need a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interop.peer import PeerResult, assert_same_tensors, run_peer

pytestmark = [pytest.mark.interop, pytest.mark.processes, pytest.mark.timeout(900)]
SCRIPT = "offload_megatron_fsdp.py"
MODELS = [
    "stage1-float32",
    "stage1-bfloat16-gated",
    "stage2-bfloat16",
    "stage2-float32-gated",
    "stage3-float32",
    "stage3-bfloat16-gated",
    "stage3-bfloat16-masters-decoupled",
    "stage2-bfloat16-masters-gated",
]
OPTIMIZERS = ["half", "all-overlap-pin", "shardproof", "adamw"]
SAVED = [f"{model}-{OPTIMIZERS[at % 3]}" for at, model in enumerate(MODELS)]
SAVED.append("stage3-bfloat16-gated-adamw")


def exact(name: str) -> bool:
    """True if the optimizers of a model have no master that AdamW lacks."""
    return "masters" not in name


def into(optimizer: str, by: int = 0) -> list[str]:
    """The saved cases with another optimizer, at other stages."""
    cases = []
    for name in SAVED:
        words = [word for word in name.split("-") if word not in "-".join(OPTIMIZERS).split("-")]
        words[0] = f"stage{(int(words[0][-1]) + by - 1) % 3 + 1}"
        if exact(name) or optimizer != "adamw":
            cases.append(f"{name}:{'-'.join(words)}-{optimizer}")
    return cases


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, PeerResult]]:
    """Checkpoints of 2 and 3 ranks, whose saves overlap the next step, and the state that the ranks had."""
    found = {}
    for ranks in (2, 3):
        folder = tmp_path_factory.mktemp(f"offload-{ranks}")
        found[ranks] = folder, run_peer("megatron", SCRIPT, "save", folder, *SAVED, nproc=ranks, timeout=400)
    return found


@pytest.mark.parametrize(
    ("writers", "readers", "optimizer", "by"),
    [
        (2, 3, "half", 0),
        (3, 2, "all-overlap", 1),
        (3, 1, "half", 2),
        (2, 2, "all", 0),
        (3, 2, "shardproof", 1),
        (2, 3, "adamw", 2),
    ],
)
def test_state_and_training_continue(
    saved: dict[int, tuple[Path, PeerResult]], writers: int, readers: int, optimizer: str, by: int
) -> None:
    """With other ranks, stages, fractions and optimizers. The run that loads was made with another rate."""
    folder, before = saved[writers]
    cases = into(optimizer, by)
    after = run_peer("megatron", SCRIPT, "load", folder, *cases, nproc=readers, timeout=400)
    names = tuple(f"{case.partition(':')[0]}." for case in cases)
    expected = {key: item for key, item in before.tensors.items() if key.startswith(names)}
    assert_same_tensors(after.tensors, expected)
    for name in names:
        # A sum of the gradients of other ranks is rounded otherwise, in bfloat16 too.
        bound = 0 if writers == readers else 2e-2 if "bfloat16" in name else 1e-5
        losses = before.facts[f"{name}losses"]
        assert after.facts[f"{name}losses"] == pytest.approx(losses, rel=bound, abs=0), name
        assert after.facts[f"{name}lr"] == [0.01]


def test_memory_is_pinned_without_a_dtensor(saved: dict[int, tuple[Path, PeerResult]]) -> None:
    """With `pin_cpu_params` and without: the released class pins the copies of its parameters in both cases.

    `offload_stubs` stands for `Tensor.pin_memory`, which needs an accelerator, and notes what it is called
    for. `test_copies_overlap_on_a_gpu` pins.
    """
    for _, before in saved.values():
        for name in SAVED:
            if "half" in name or "all" in name:
                assert before.facts[f"{name}.pinned"] == ["Tensor"]


def test_torch_saves_and_loads_the_state_dict(tmp_path: Path) -> None:
    """The optimizer's state dict has its positions. It leaves out masters that repeat the parameters."""
    cases = ["stage3-bfloat16-gated-half", "stage3-bfloat16-masters-all", "stage2-float32-all-overlap"]
    before = run_peer("megatron", SCRIPT, "save_dcp", tmp_path, *cases, nproc=3, timeout=300)
    for readers in (2, 3):
        after = run_peer("megatron", SCRIPT, "load_dcp", tmp_path, *cases, nproc=readers, timeout=300)
        assert_same_tensors(after.tensors, before.tensors)
        for name in cases:
            bound = 0 if readers == 3 else 2e-2
            losses = before.facts[f"{name}.losses"]
            assert after.facts[f"{name}.losses"] == pytest.approx(losses, rel=bound, abs=0)
            masters = ["master_param"] if "masters" in name else []
            assert before.facts[f"{name}.slots"] == ["exp_avg", "exp_avg_sq", *masters, "step"]


def test_experts_of_other_ranks(tmp_path: Path) -> None:
    """Expert parallelism over two groups of two ranks, then of one, then none. The numbers are declared."""
    case = "stage3-bfloat16-gated-ep-half"
    before = run_peer("megatron", SCRIPT, "save", tmp_path, case, nproc=4, timeout=300)
    for ranks, words in (2, "stage2-bfloat16-gated-ep-all"), (1, "stage3-bfloat16-gated-four-adamw"):
        after = run_peer("megatron", SCRIPT, "load", tmp_path, f"{case}:{words}", nproc=ranks, timeout=300)
        assert_same_tensors(after.tensors, before.tensors)
    errors = run_peer("megatron", SCRIPT, "undeclared", tmp_path, "stage3-bfloat16-gated-ep-half", nproc=2)
    assert "layouts.experts.sequential" in errors.facts[f"{case}.undeclared"]


def test_the_copies_follow_a_load_of_the_model_alone(saved: dict[int, tuple[Path, PeerResult]]) -> None:
    folder, before = saved[3]
    cases = [f"{name}:{name.removesuffix('-shardproof')}" for name in SAVED if "shardproof" not in name]
    after = run_peer("megatron", SCRIPT, "model_alone", folder, *cases, nproc=2, timeout=300)
    for case in cases:
        name = case.partition(":")[0]
        weights = {key: item for key, item in before.tensors.items() if key.startswith(f"{name}.model.")}
        del weights[f"{name}.model.seen"]  # the step counts it
        assert_same_tensors({key: after.tensors[key] for key in weights}, weights)
        for key, master in after.tensors.items():
            if key.startswith(f"{name}.") and key.endswith(".master"):
                weight = weights[key.replace(".optimizer.", ".model.").removesuffix(".master")]
                assert torch.equal(master.to(weight.dtype), weight)


def test_a_parameter_without_a_gradient_stays(tmp_path: Path) -> None:
    cases = ["stage3-bfloat16-gated-half", "stage3-bfloat16-masters-half", "stage3-bfloat16-masters-all"]
    facts = run_peer("megatron", SCRIPT, "without_gradient", tmp_path, *cases, nproc=2).facts
    assert [facts[f"{name}.changed"] for name in cases] == [[], [], []]


def test_wrong_use_says_what_to_change(tmp_path: Path) -> None:
    """The released class fails in its first step, which is the reason for ours."""
    name = "stage3-bfloat16-gated-half"
    errors = run_peer("megatron", SCRIPT, "wrong", tmp_path, name, nproc=2).facts
    assert errors[f"{name}.pinned"] == ["DTensor"]  # by the released class
    assert "mixed torch.Tensor and DTensor" in errors[f"{name}.released"]
    assert "megatron_fsdp.optimizer_state(optimizer, model)" in errors[f"{name}.bare"]
    assert "Pass all parameters to the constructor" in errors[f"{name}.group"]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="copies on side streams and pinned memory need a GPU"
)
def test_copies_overlap_on_a_gpu(tmp_path: Path) -> None:
    """On a device, without the stand-ins: the state after an overlapped step is that of a step without."""
    states = [
        run_peer("megatron", SCRIPT, "save", tmp_path / words, f"x:stage3-bfloat16-gated-{words}").tensors
        for words in ("all-overlap-pin", "all")
    ]
    assert_same_tensors(states[0], states[1])
