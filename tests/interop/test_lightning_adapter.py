"""`shardproof.frameworks.lightning` with the released Lightning: killed, resumed, compared bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.interop.checkpoints import assert_same_checkpoints
from tests.interop.training import EXAMPLES, SCRIPTS, train

pytestmark = [pytest.mark.interop, pytest.mark.processes]

SCRIPT = SCRIPTS / "train_lightning.py"
LIGHTNING = "lightning.pytorch"
LOADERS = [
    "ordered",
    "shuffled",
    "noise",
    "workers",
    "own_sampler",
    "random_sampler",
    "distributed",
    "stateful_distributed",
    "sized_stream",
    "limited_stream",
    "stream_in_worker",
    "own_loader",
]
"""The data loaders of `train_lightning_loaders.py` that docs/frameworks/lightning.md says to resume."""
OTHER_LOADERS = ["generator", "torch_random_sampler", "stream", "noise_in_workers"]
"""Those that it says not to."""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_that_is_killed_in_a_save_within_an_epoch_resumes(strategy: str, tmp_path: Path) -> None:
    """On the same number of ranks, training ends like an uninterrupted run. On more ranks, it begins with the
    saved state."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    train("torch", SCRIPT, LIGHTNING, strategy, "ours", whole, tmp_path / "expected", nproc=2)
    train("torch", SCRIPT, LIGHTNING, strategy, "ours", run, tmp_path / "none", nproc=2, kill_in_save=3)
    assert not (run / "step=6.ckpt" / "manifest.json").exists()

    train("torch", SCRIPT, LIGHTNING, strategy, "ours", run, tmp_path / "wider", nproc=3, RESTORED="1")
    assert_same_checkpoints(tmp_path / "wider", run / "step=4.ckpt", ranks=2, but=["lightning", "loaders"])

    train("torch", SCRIPT, LIGHTNING, strategy, "ours", run, tmp_path / "found", nproc=2)
    assert_same_checkpoints(tmp_path / "found", tmp_path / "expected", but=["lightning.callbacks"])
    with sp.open(tmp_path / "found") as checkpoint:
        assert checkpoint["lightning"]["global_step"] == 10
        shards = len(list((tmp_path / "found" / "shards").iterdir()))
        assert shards == 2, "each rank writes its own part"


def resume_loaders(
    callback: str, run: Path, *loaders: str, nproc: int = 1
) -> tuple[dict[str, dict[str, str]], str]:
    """What the resumed runs share with the first one, by loader and checkpoint; and what rank 0 wrote."""
    text = train("torchao", SCRIPTS / "train_lightning_loaders.py", callback, run, *loaders, nproc=nproc)
    of_rank_0 = text.partition("--- rank 1")[0].strip()
    return json.loads(of_rank_0.rpartition("\n")[2]), of_rank_0


def test_data_loaders_continue_with_the_next_batch(tmp_path: Path) -> None:
    """Within an epoch, after its last batch, and after its end: batches, random numbers and weights agree."""
    found, text = resume_loaders("ours", tmp_path, *LOADERS)
    everything = {"within": "same", "last_batch": "same", "epoch_end": "same"}
    assert found == dict.fromkeys(LOADERS, everything)
    assert "skips a batch" not in text


@pytest.mark.parametrize("callback", ["ours", "theirs"])
def test_a_loader_that_lightning_divides_among_ranks(callback: str, tmp_path: Path) -> None:
    """Without `shuffle=True`, it continues. With it, Lightning wraps the sampler in one without a state."""
    found, _ = resume_loaders(callback, tmp_path, "divided", "divided_shuffled", nproc=2)
    assert found["divided_shuffled"]["within"] == "none"
    assert (set(found["divided"].values()) == {"same"}) == (callback == "ours"), found


@pytest.mark.parametrize("callback", ["ours", "theirs"])
def test_loaders_that_do_not_continue_do_not_with_lightning_either(callback: str, tmp_path: Path) -> None:
    compared = ["shuffled", "distributed"] if callback == "theirs" else []
    found, text = resume_loaders(callback, tmp_path, *OTHER_LOADERS, *compared)
    assert [found[name]["within"] for name in OTHER_LOADERS] == ["none"] * len(OTHER_LOADERS)
    assert text.count("this run skips a batch") == (callback == "ours"), text
    if callback == "ours":
        workers = {"within": "none", "last_batch": "same", "epoch_end": "same"}
        assert found["noise_in_workers"] == workers
    else:
        assert found["shuffled"] == {"within": "batches", "last_batch": "none", "epoch_end": "none"}
        assert found["distributed"]["within"] == "none"


def test_example_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    example = EXAMPLES / "lightning_fit.py"
    train("torch", example, tmp_path / "whole", nproc=2)
    train("torch", example, tmp_path / "run", nproc=2, kill_in_save=4)
    shutil.copytree(tmp_path / "run", tmp_path / "narrow")
    train("torch", example, tmp_path / "run", nproc=2)
    last = "epoch=5-step=36.ckpt"
    assert_same_checkpoints(tmp_path / "run" / last, tmp_path / "whole" / last, but=["lightning.callbacks"])

    train("torch", example, tmp_path / "narrow", nproc=1)  # 12 steps an epoch: 18 saved, 3 epochs to go
    assert (tmp_path / "narrow" / "epoch=5-step=54.ckpt" / "manifest.json").exists()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_checkpoint_of_lightning_resumes(package: str, tmp_path: Path) -> None:
    run, last = tmp_path / "run", tmp_path / "last"
    train("torch", SCRIPT, package, "ddp", "theirs", run, last, nproc=2)
    old = run / "step=4.ckpt"
    train("torch", SCRIPT, package, "ddp", "ours", run, last, old, nproc=2, RESTORED="1")
    with sp.open(old) as theirs, sp.open(last) as ours:
        for number, name in enumerate(("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")):
            key = f"state_dict.{name}"
            assert torch.equal(ours[key].read(), theirs[key].read()), key
            slots = f"optimizer_states.0.state.{number}"
            for slot in ("exp_avg", "exp_avg_sq", "step"):
                stored = ours[f"optimizers.0.{name}.{slot}"].read()
                assert torch.equal(stored, theirs[f"{slots}.{slot}"].read()), (key, slot)
        assert ours["lightning"]["global_step"] == 4
        assert ours["lightning"]["lr_schedulers"][0]["last_epoch"] == 4
        (callback,) = ours["lightning"]["callbacks"].values()  # ModelCheckpoint's state, which ours took over
        assert callback["best_model_path"] == str(old)


@pytest.mark.parametrize(
    "packages",
    [[LIGHTNING], ["pytorch_lightning"], [LIGHTNING, "pytorch_lightning"]],
    ids=["lightning", "pytorch_lightning", "both"],
)
def test_a_class_of_a_strategy_is_made_once_and_keeps_its_own_methods(packages: list[str]) -> None:
    assert "classes are made" in train("torch", SCRIPTS / "classes_with_shardproof.py", *packages, nproc=1)


def test_a_checkpoint_callback_of_lightning_beside_ours_saves_with_shardproof(tmp_path: Path) -> None:
    """Its rotation removes its earlier checkpoint, and a trainer without it resumes."""
    run, beside, last = tmp_path / "run", tmp_path / "beside", tmp_path / "last"
    train("torch", SCRIPT, LIGHTNING, "ddp", "ours", run, last, nproc=2, BESIDE=str(beside))
    (kept,) = beside.iterdir()
    assert len(list((kept / "shards").iterdir())) == 2, "each rank writes its own part"
    train("torch", SCRIPT, LIGHTNING, "ddp", "ours", run, tmp_path / "found", kept, nproc=3, RESTORED="1")
    assert_same_checkpoints(tmp_path / "found", kept, ranks=2, but=["lightning", "loaders"])


def test_checkpoint_callbacks_of_lightning_save_through_our_checkpoint_io(tmp_path: Path) -> None:
    """Killed in a save, resumed on other ranks; the values are those of Lightning's file of the same step."""
    run, theirs, beside, last = (tmp_path / name for name in ("run", "theirs", "beside", "last"))
    train("torch", SCRIPT, LIGHTNING, "ddp", "theirs", theirs, last, nproc=1)
    train("torch", SCRIPT, LIGHTNING, "ddp", "io", run, last, nproc=1, kill_in_save=3)
    assert not (run / "step=6.ckpt" / "manifest.json").exists()

    compare = SCRIPTS / "compare_lightning.py"
    saved = [theirs / "step=4.ckpt", run / "step=4.ckpt"]
    assert "equal: 16 tensors" in train("torch", compare, "callbacks", *saved, nproc=1)
    with pytest.raises(AssertionError, match="holds no committed checkpoint"):
        train("torch", compare, "callbacks", run / "step=6.ckpt", nproc=1)
    restored = [tmp_path / "from-theirs", tmp_path / "from-ours"]
    for old, new in zip(saved, restored, strict=True):
        train("torch", SCRIPT, LIGHTNING, "ddp", "io", run, new, old, nproc=2, RESTORED="1")
    train("torch", compare, "callbacks,loops", *saved, *restored, nproc=1)

    train(
        "torch", SCRIPT, LIGHTNING, "ddp", "io", run, last, run / "step=4.ckpt", nproc=2, BESIDE=str(beside)
    )
    (kept,) = beside.iterdir()  # its rotation removed the one before
    with sp.open(kept) as checkpoint:
        assert checkpoint["lightning"]["global_step"] == 8
        weight = checkpoint["state_dict.net.0.weight"].read()
    module = torch.nn.ModuleDict({"net": torch.nn.Sequential(torch.nn.Linear(7, 9))})
    sp.load(kept, {"m": module}, rename={"m": "state_dict"}, include="m.net.0.*")
    assert torch.equal(module["net"][0].weight, weight)


def test_averaged_weights_are_restored(tmp_path: Path) -> None:
    """A callback puts the average under the keys of the module, and the current weights beside it."""
    run, saved, found = tmp_path / "run", tmp_path / "saved", tmp_path / "found"
    train("torch", SCRIPT, LIGHTNING, "ddp", "ours", run, saved, nproc=2, AVERAGE="1")
    train("torch", SCRIPT, LIGHTNING, "ddp", "ours", run, found, run / "step=4.ckpt", nproc=2, AVERAGE="1")
    with sp.open(saved) as expected, sp.open(found) as restored:
        assert list(expected) == list(restored)
        for key in expected:
            assert torch.equal(expected[key].read(), restored[key].read()), key
        average, current = expected["average.module.net.0.weight"], expected["current.net.0.weight"]
        assert not torch.equal(average.read(), current.read())


def test_a_loose_load_is_strict_for_all_but_the_weights(tmp_path: Path) -> None:
    run, last = tmp_path / "run", tmp_path / "last"
    train("torch", SCRIPT, LIGHTNING, "ddp", "ours", run, last, nproc=1, WEIGHTS_ONLY="1")
    options = {"nproc": 1, "LOOSE": "1"}
    text = train("torch", SCRIPT, LIGHTNING, "ddp", "ours", run, last, last, **options)
    assert "optimizers.0" in text and "unchanged True" in text
    text = train("torch", SCRIPT, LIGHTNING, "ddp", "ours", run, last, run / "step=4.ckpt", **options)
    assert "trained to step 10" in text


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    """Lightning accepts FSDPStrategy on accelerators alone, so the script calls `setup` itself."""
    text = train("torch", SCRIPT, LIGHTNING, "fsdp1", "ours", tmp_path, tmp_path, nproc=1)
    assert "does not work with FSDPStrategy: FSDP1 collects its state with collectives" in text
    assert "Use ModelParallelStrategy with fully_shard" in text
