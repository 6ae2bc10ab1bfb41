"""The demo of a fault: every kind of fault gets its verdict, and changed facts fail the claim about them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from examples.demo import FaultReport, print_fault_report, run_fault_demo
from examples.demo.__main__ import main as demo_command
from examples.demo.evidence import RunRecords
from examples.demo.fault_claims import FaultRunFacts, claims_of
from examples.demo.fault_story import FAULTS, FaultStory
from examples.demo.story import Record

CODES = {"transient": [0], "persistent": [16, 16, 0], "correct": [16, 17, 0]}


def check(report: FaultReport) -> None:
    assert report.ok, json.dumps(report.to_json(), indent=1)
    assert [run.code for run in report.runs] == CODES[report.fault]
    verdicts = [run.verdict for run in report.runs if run.verdict is not None]
    assert len(verdicts) == 1
    assert verdicts[0].startswith(FAULTS[report.fault])
    assert "of node node-a" in verdicts[0]
    found = {claim.what: claim.found for claim in report.claims}
    assert found["steps to skip (counted from 0)"] == (
        str(report.fault_step - 1) if report.fault == "correct" else "none"
    )
    assert sum(claim.found == "188 of 188" for claim in report.claims) == 1
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def check_shown(report: FaultReport) -> None:
    shown = text_of(report)
    assert "✗" not in shown
    assert f"{FAULTS[report.fault]} in step 4: rank 0 on device 0 (GPU-node-a-0) of node node-a" in shown


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["transient", "correct"])
def test_one_rank(fault: str) -> None:
    report = run_fault_demo(fault, ranks=1, steps=6, save_every=2)
    check(report)
    assert report.folder is None
    check_shown(report)


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks(fault: str, ranks: int) -> None:
    report = run_fault_demo(fault, ranks=ranks, steps=6, save_every=2)
    check(report)
    assert f"rank {ranks - 1} on device {ranks - 1}" in str([run.verdict for run in report.runs])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "sharding"), [("adamw", "flat"), ("distributed", "none"), ("hybrid", "fsdp2")]
)
def test_other_optimizers_and_shardings(optimizer: str, sharding: str) -> None:
    check(
        run_fault_demo("persistent", ranks=2, steps=6, save_every=2, optimizer=optimizer, sharding=sharding)
    )


def text_of(report: FaultReport) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=140)
    print_fault_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- claims: a false claim must fail


class RecordedStory:
    """The files of a successful story, which tests change so that a claim becomes false."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.story = FaultStory.of("persistent", 1, 6, 2)
        self.events: list[str] = []
        self.report = run_fault_demo(
            "persistent",
            ranks=1,
            steps=6,
            save_every=2,
            run_dir=folder,
            on_event=lambda event: self.events.append(event.kind),
        )
        self.reference, *self.records = (
            RunRecords.of(self.story.task(number, folder=folder, text=Path(), device="cpu"))
            for number in range(4)
        )
        self.log = folder / "rejected.jsonl"

    def failed(self, facts: list[FaultRunFacts], records: list[RunRecords], log: Path) -> list[str]:
        """The false claims."""
        runs = list(zip(facts, records, strict=True))
        return [claim.what for claim in claims_of(self.story, self.reference, runs, log) if not claim.ok]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedStory:
    return RecordedStory(tmp_path_factory.mktemp("demo") / "run")


def test_a_persistent_fault_on_one_rank(recorded: RecordedStory) -> None:
    check(recorded.report)
    check_shown(recorded.report)
    assert {"begin", "step", "decided", "end"} <= set(recorded.events)
    assert recorded.report.folder == str(recorded.folder.resolve())
    assert recorded.failed(list(recorded.report.runs), recorded.records, recorded.log) == []


@pytest.mark.parametrize(
    ("run", "changes", "claim"),
    [
        (1, {"code": 17}, "exit codes"),
        (0, {"times": 1}, "times that step"),
        (2, {"source": "step 4"}, "started from"),
        (1, {"suspects": ()}, "suspect checkpoints"),
        (2, {"in_output": False}, "reaches a verdict and prints it"),
        (1, {"in_output": True}, "reaches a verdict and prints it"),
        (0, {"decisions": 2}, "decided equally"),
    ],
)
def test_changed_facts_fail_their_claim(
    recorded: RecordedStory, run: int, changes: dict[str, Any], claim: str
) -> None:
    facts = list(recorded.report.runs)
    facts[run] = replace(facts[run], **changes)
    (failed,) = recorded.failed(facts, recorded.records, recorded.log)
    assert claim in failed


@pytest.mark.parametrize(
    ("name", "value", "claim"),
    [
        ("verdict", "transient fault", "verdict in the log"),
        ("node", "node-b", "device in the log"),
        ("rank", 1, "device in the log"),
        ("step", 5, "step (counted from 0) and result"),
        ("first", 2.0, "step (counted from 0) and result"),
        ("second", "nan", "the result of the rerun"),
    ],
)
def test_a_changed_log_fails_its_claim(
    recorded: RecordedStory, tmp_path: Path, name: str, value: Any, claim: str
) -> None:
    log = tmp_path / "log"
    log.write_text(json.dumps(json.loads(recorded.log.read_text()) | {name: value}) + "\n")
    assert recorded.failed(list(recorded.report.runs), recorded.records, log) == [claim]
    log.write_text("")
    assert claim in recorded.failed(list(recorded.report.runs), recorded.records, log)


def moved(record: Record, name: str, value: Any) -> Record:
    return record | {name: value} if name in record else record


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (lambda r: moved(r, "plain", "other"), "schedule and data position"),
        (lambda r: r | {"loss": r["loss"] + 1e-9} if r["event"] == "step" else r, "largest difference"),
        (lambda r: moved(r, "draws", [0.1]), "random numbers"),
        (lambda r: r if r.get("step") != 6 or r["event"] != "step" else {"event": "lost"}, "steps trained"),
        (lambda r: moved(r, "tensors", {"w": ["00", 1]}), "tensors at the end"),
    ],
)
def test_changed_training_records_fail_their_claim(
    recorded: RecordedStory, change: Callable[[Record], Record], claim: str
) -> None:
    records = list(recorded.records)
    records[2] = RunRecords(tuple(tuple(map(change, rank)) for rank in records[2].ranks))
    (failed,) = recorded.failed(list(recorded.report.runs), records, recorded.log)
    assert claim in failed


def test_facts_come_from_the_records_of_all_ranks() -> None:
    story = FaultStory.of("transient", 2, 6, 2)
    ran: Record = {"event": "ran", "step": 5}
    decided: Record = {"event": "decided", "attribution": "transient fault in step 4"}

    def facts(*ranks: tuple[Record, ...], output: str = "") -> FaultRunFacts:
        run = story.runs[0]
        return FaultRunFacts.of(run, RunRecords(ranks), 5, code=0, suspects=[], output=output, seconds=1.0)

    alike = facts((ran, ran, decided), (ran, ran, decided), output="so: transient fault in step 4\n")
    assert (alike.times, alike.decisions, alike.in_output, alike.source) == (2, 1, True, "the beginning")
    assert facts((ran, ran, decided), (ran, decided)).times == -1
    assert facts((ran, decided), (ran,)).decisions == 2
    assert not facts((decided,), (decided,), output="nothing").in_output
    restored: Record = {"event": "restored", "step": 4, "folder": "suspect-00000004"}
    assert facts((restored,), (restored,)).source == "suspect 4"
    assert facts((restored,), (restored | {"folder": "step-00000004"},)).source == "ranks differ"


def test_a_report_shows_its_false_claims(recorded: RecordedStory) -> None:
    first, *others = recorded.report.claims
    report = replace(recorded.report, claims=(replace(first, found="17, 16, 0"), *others))
    assert not report.ok
    assert report.to_json()["claims"][0]["ok"] is False
    shown = text_of(report)
    assert "17, 16, 0 (expected: 16, 16, 0)" in shown
    assert f"1 of {len(report.claims)} claims are false" in shown


# ---- the parts


def test_ranks_to_resume_on_are_refused_beside_a_fault() -> None:
    done = CliRunner().invoke(demo_command, ["--inject", "transient", "--resume-ranks", "1"])
    assert done.exit_code == 2
    assert "--resume-ranks does not go with --inject" in done.output


def test_arguments_that_make_no_story_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not one of transient, persistent, correct"):
        run_fault_demo("sporadic")
    with pytest.raises(ValueError, match="steps"):
        run_fault_demo("transient", steps=4, save_every=2)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="not empty"):
        run_fault_demo("transient", run_dir=tmp_path)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(16)", 16),
        pytest.param("sys.exit(0)", 0, marks=pytest.mark.slow),
        pytest.param("raise ValueError('no')", 1, marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
    ],
)
def test_the_launcher_ends_as_its_workers_do(tmp_path: Path, ending: str, code: int) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import os, signal, sys\n{ending}\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "examples.demo.torchrun", "--nnodes=1", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(script)),
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
