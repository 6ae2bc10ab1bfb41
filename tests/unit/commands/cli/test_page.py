"""The facts of a page are those of the other commands, and the file is whole, bounded and inert."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof import events
from shardproof.commands import report
from shardproof.commands.cli.group import run
from shardproof.commands.report import (
    Stored,
    TensorDetail,
    checkpoint_facts,
    describe,
    detail,
    difference,
    html_file,
    html_of,
    page_facts,
)
from shardproof.commands.report.page_difference import layer_of
from shardproof.engine.foreign import Foreign
from shardproof.engine.format import FileRecord, Manifest, TensorRecord
from shardproof.engine.planning import ChunkTable
from shardproof.runs.checkpointer.step_folders import NodeMark, write_node_mark
from shardproof.storage import LocalStorage
from tests.unit.commands.cli.samples import Sample, cut, model, rows_cut, write

STATE = model(2)
HOURS = 3600.0
BEGUN = time.time() - 10 * HOURS
HOSTILE = (
    "</script><script>document.title = 'x'</script>",
    '"><img src=x onerror="document.title = 1">.w',
    "<!--<script>",
    "\u202egnp.exe",
    "line\u2028and\u2029line\nfeed\x1b[2J",
    "constructor.__proto__.x",
)


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str]) -> Any:
    """The facts that ``page --json`` prints."""

    def called(*arguments: object) -> dict[str, Any]:
        assert run(["page", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    return called


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    """What another command prints with ``--json``."""

    def called(*arguments: object) -> Any:
        run([*map(str, arguments), "--json"])
        return json.loads(capsys.readouterr().out)

    return called


def sample(step: int, attempt: str = "a1", **changed: Any) -> Sample:
    """A checkpoint of two ranks, saved in the hour of its step."""
    cuts = {key: rows_cut(array.shape, 2) for key, array in STATE.items()}
    about: dict[str, Any] = {
        "tensors": STATE,
        "cuts": cuts,
        "world_size": 2,
        "aliases": {"head": "model.embed.weight"},
    }
    return Sample(step=step, time=BEGUN + step * HOURS, attempt=attempt, **about | changed)


def make_old(folder: Path, seconds: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (seconds, seconds))


@pytest.fixture
def busy_run(tmp_path: Path) -> Path:
    """Steps 1 to 3 are committed and 2 is pinned, 4 is damaged, 5 is a leftover, and there is a suspect."""
    folder = tmp_path / "run"
    for step in range(1, 6):
        write(folder / f"step-{step:08d}", sample(step), commit=step < 5)
        make_old(folder / f"step-{step:08d}", BEGUN + step * HOURS + 2 * step)
    write(folder / "suspect-00000003", sample(3, "b1"))
    cut(folder / "step-00000004")
    cut(folder / "step-00000005")
    (folder / "step-00000002" / "pinned.json").write_text('{"label": "best", "time": 1.0}')
    return folder


# The facts of a run.


def test_the_steps_are_those_of_ls_and_the_faults_those_of_doctor(
    page: Any, said: Any, busy_run: Path
) -> None:
    facts = page(busy_run)
    listed = {info["name"]: info for info in said("ls", busy_run)["checkpoints"]}
    assert [step["name"] for step in facts["steps"]] == [*listed]
    for step in facts["steps"]:
        assert {name: step[name] for name in listed[step["name"]]} == listed[step["name"]]
    examined = said("doctor", busy_run)
    assert facts["examination"]["findings"] == examined["findings"]
    assert any(finding["fix"] for finding in examined["findings"])
    by_name = {step["name"]: step for step in facts["steps"]}
    assert by_name["step-00000003"]["seconds"] == pytest.approx(6)
    assert by_name["step-00000005"]["seconds"] is None
    assert by_name["step-00000005"]["written"] is not None, "its place on the time line"


def test_a_page_names_the_step_that_a_restore_takes(page: Any, busy_run: Path) -> None:
    facts = page(busy_run)["restore"]
    target = {key: torch.from_numpy(array.copy()) for key, array in STATE.items()}
    restored = sp.Checkpointer(busy_run).restore(target, strict=False)
    assert restored is not None and facts["takes"] == f"step-{restored:08d}" == "step-00000003"
    assert [item["folder"] for item in facts["passed_over"]] == ["step-00000005", "step-00000004"]
    assert [item["damaged"] for item in facts["passed_over"]] == [False, True]
    for step in (1, 2, 3):
        (busy_run / f"step-{step:08d}" / "manifest.json").unlink()
    facts = page(busy_run)["restore"]
    assert facts["takes"] is None and "none can be read" in facts["fault"]


def test_a_page_of_a_run_logs_nothing(busy_run: Path, page: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A restore logs the suspects that it does not take. On the page they are a finding of doctor."""
    page(busy_run)
    assert caplog.records == []


def test_the_choice_counts_the_second_tier(page: Any, tmp_path: Path) -> None:
    for tier, steps in (("near", (1, 2)), ("far", (1, 2, 3))):
        for step in steps:
            write(tmp_path / tier / f"step-{step:08d}", sample(step))
    cut(tmp_path / "near" / "step-00000002")
    alone, both = page(tmp_path / "near"), page(tmp_path / "near", "--second-tier", tmp_path / "far")
    assert [facts["restore"]["takes"] for facts in (alone, both)] == ["step-00000001", "step-00000003"]
    assert [step["second_tier"] for step in both["steps"]] == ["committed", "committed"]
    assert {step["second_tier"] for step in alone["steps"]} == {None}


def test_the_folder_of_one_node_has_no_choice_of_its_own(page: Any, busy_run: Path) -> None:
    write_node_mark(LocalStorage(busy_run), NodeMark(nodes=("a:/run", "b:/run"), own=0, replicas=0))
    facts = page(busy_run)["restore"]
    assert facts["takes"] is None and "node_local=True" in facts["fault"]


def test_the_interval_is_that_of_ls(page: Any, said: Any, busy_run: Path) -> None:
    facts = page(busy_run, "--mtbf", "12h")["interval"]
    advice = said("ls", busy_run, "--mtbf", "12h")["interval"]
    assert {name: facts[name] for name in advice} == advice
    assert facts["differs_much"] is True
    (same,) = [one for one in facts["suggestions"] if one["mtbf"] == 12 * HOURS]
    assert same["suggested"] == advice["suggested"]
    alone = page(busy_run)["interval"]
    assert (alone["mtbf"], alone["suggested"], alone["interval"]) == (None, None, advice["interval"])


def test_traces_tell_how_long_training_waited(page: Any, tmp_path: Path) -> None:
    with events.trace(tmp_path / "trace"):
        checkpointer = sp.Checkpointer(tmp_path / "run")
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(2)}).result()
    sp.Checkpointer(tmp_path / "run").save(3, {"w": torch.ones(2)}).result()
    (tmp_path / "trace" / "other.json").write_text("{}")
    blocked = [step["blocked"] for step in page(tmp_path / "run", "--trace", tmp_path / "trace")["steps"]]
    assert blocked[0] > 0 and blocked[1] > 0 and blocked[2] is None


# The facts of a checkpoint.


def test_each_tensor_is_as_inspect_shows_it(page: Any, said: Any, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    boxes = [(0, ((0, 0), (16, 3))), (1, ((0, 3), (10, 5))), (0, ((10, 3), (6, 5)))]
    shapes = {"extra.a": (3, 5), "extra.b": (5, 3), "extra.c": (3, 5)}  # not cut: they differ in size or file
    state = STATE | {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
    cuts = {**sample(1).cuts, "model.embed.weight": boxes, "extra.c": [(1, ((0, 0), (3, 5)))]}
    write(folder, sample(1, tensors=state, cuts=cuts, objects={"lr": 0.5}, metadata={"note": "hi"}))
    facts, stored = page(folder), describe(LocalStorage(folder))
    assert [row["key"] for row in facts["tensors"]] == sorted(state)
    for row in facts["tensors"]:
        found = detail(stored.manifest, stored.table, row["key"])
        assert isinstance(found, TensorDetail)
        assert (row["dtype"], row["shape"], row["bytes"]) == (found.dtype, [*found.shape], found.bytes)
        assert (row["chunks"], row["files"]) == (
            len(found.chunks),
            len({chunk.file for chunk in found.chunks}),
        )
        assert (row.get("tied", []), row["digest"]) == ([*found.tied], "stored")
        layout, dims = facts["layouts"][row["layout"]], len(row["shape"])
        columns = [np.reshape(layout[name], (-1, dims)).tolist() for name in ("offsets", "sizes")]
        writers = [facts["summary"]["writers"][file] for file in layout["files"]]
        assert sorted(
            (offsets, sizes, writer["rank"], writer["file"])
            for offsets, sizes, writer in zip(*columns, writers, strict=True)
        ) == [([*chunk.offsets], [*chunk.sizes], chunk.rank, chunk.file) for chunk in found.chunks]
    shown = said("inspect", folder)
    same = facts["summary"].keys() & shown.keys()
    assert same >= {"bytes", "chunks", "step", "writers", "aliases"}
    assert {name: facts["summary"][name] for name in same} == {name: shown[name] for name in same}
    assert (facts["metadata"], facts["values"]) == ({"note": "'hi'"}, {"lr": "0.5"})
    assert facts["dtypes"] == [{"dtype": "float32", "tensors": len(state), "bytes": shown["bytes"]}]


def test_verify_marks_the_damaged_tensors(page: Any, said: Any, tmp_path: Path) -> None:
    write(tmp_path / "step", sample(1))
    assert page(tmp_path / "step")["verified"] is None
    whole = page(tmp_path / "step", "--verify")
    assert whole["verified"]["ok"] and {row["digest"] for row in whole["tensors"]} == {"verified"}
    found = detail(*_described(tmp_path / "step"), "model.layers.1.wq")
    assert isinstance(found, TensorDetail)
    with open(tmp_path / "step" / found.chunks[0].file, "r+b") as file:
        file.seek(found.chunks[0].byte_start)
        file.write(b"\xff")
    facts = page(tmp_path / "step", "--verify")
    digests = {row["key"]: row["digest"] for row in facts["tensors"]}
    assert digests.pop("model.layers.1.wq") == "damaged"
    assert set(digests.values()) == {"verified"}
    assert facts["verified"]["faults"] == said("verify", tmp_path / "step")["faults"]


def _described(folder: Path) -> tuple[Manifest, ChunkTable]:
    stored = describe(LocalStorage(folder))
    return stored.manifest, stored.table


def test_a_page_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, sample(1))
    stored = describe(LocalStorage(tmp_path))
    assert len(checkpoint_facts(stored)["layouts"]) == 2, "one for each shape"
    monkeypatch.setattr(page_facts, "MOST_BOXES", 3)
    monkeypatch.setattr(page_facts, "MOST_TENSORS", 4)
    facts = checkpoint_facts(stored)
    assert [row["layout"] for row in facts["tensors"]] == [0, None, None, 0], "the largest tensors come first"
    assert facts["tensors_left_out"] == len(STATE) - 4


def test_a_foreign_checkpoint_has_a_page_without_digests(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "step", sample(1))
    sp.convert(tmp_path / "step", tmp_path / "w.safetensors", to="safetensors")
    facts = page(tmp_path / "w.safetensors", "--verify")
    assert {row["digest"] for row in facts["tensors"]} == {"none"}
    assert facts["summary"]["format"] == "safetensors" and facts["summary"]["notes"]
    assert facts["verified"]["unproved"] == facts["summary"]["bytes"]
    assert {writer["rank"] for writer in facts["summary"]["writers"]} == {-1}


# The facts of two checkpoints.


def test_changes_are_those_of_diff_the_largest_first(page: Any, said: Any, tmp_path: Path) -> None:
    changed = {key: array.copy() for key, array in STATE.items()}
    changed["model.layers.0.wq"] *= 1.5
    changed["model.layers.0.wo"] *= 1.125
    changed["model.layers.1.wo"][0, :2] = np.nan, np.inf
    changed["model.embed.weight"] += 0.5
    del changed["optimizer.embed.weight.exp_avg"]
    write(tmp_path / "a", sample(1, objects={"lr": 0.5, "text": "x" * 1000}))
    write(tmp_path / "b", Sample(changed, step=2, objects={"lr": 0.25, "text": "y"}))
    facts, found = (
        page(tmp_path / "a", tmp_path / "b"),
        said("diff", tmp_path / "a", tmp_path / "b", "--measure"),
    )
    values = facts["difference"]["values"]
    assert sorted(values, key=lambda value: value["key"]) == found["values"]
    assert [value["key"] for value in values] == [
        "model.layers.1.wo", "model.embed.weight", "model.layers.0.wq", "model.layers.0.wo"
    ]  # fmt: skip
    assert facts["difference"]["only_a"] == found["only_a"] and facts["difference"]["only_a_in_all"] == 2
    texts = {change["key"]: change["a"] for change in facts["difference"]["objects"]}
    assert texts == {"lr": "0.5", "text": f'"{299 * "x"}... (1002 characters)'}
    assert [side["step"] for side in facts["sides"]] == [1, 2]

    layers = {layer["layer"]: layer for layer in facts["layers"]}
    assert next(iter(layers)) == "model.embed" and layers["model.layers.0"]["tensors"] == 2
    first, second = (
        np.concatenate([state[f"model.layers.0.{name}"] for name in ("wo", "wq")])
        for state in (STATE, changed)
    )
    assert layers["model.layers.0"]["relative"] == pytest.approx(
        np.linalg.norm(second - first) / np.linalg.norm(first), rel=1e-6
    )
    assert (layers["model.layers.1"]["nan"], layers["model.layers.1"]["inf"]) == ([0, 1], [0, 1])

    measured = {one["key"]: one for one in facts["histograms"]}
    stats = {one["key"]: one for one in said("stats", tmp_path / "b")["tensors"]}
    for key, one in measured.items():
        assert {name: stats[key][name] for name in one["b"]} == one["b"]
    assert measured["model.embed.weight"]["change"]["mean"] == pytest.approx(0.5)
    assert measured["model.layers.1.wo"]["change"]["count"] == 62, "where both are finite"


def test_a_tensor_that_one_side_ties_is_measured(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "a", Sample({"w": np.ones(4, np.float32)}, aliases={"v": "w"}))
    write(tmp_path / "b", Sample({"v": np.full(4, 2, np.float32)}))
    facts = page(tmp_path / "a", tmp_path / "b")
    assert [one["key"] for one in facts["histograms"]] == ["v"]
    assert facts["histograms"][0]["change"]["mean"] == 1


def test_a_page_of_one_state_has_no_changes(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "a", sample(1))
    facts = page(tmp_path / "a", tmp_path / "a")
    assert facts["difference"]["same"] and not facts["layers"] and not facts["histograms"]


def test_the_page_of_two_checkpoints_describes_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Any
) -> None:
    described: list[str] = []

    def describe_once(place: Foreign, **options: Any) -> Any:
        described.append(place.location)
        return describe(place, **options)

    for name in ("a", "b"):
        sp.save(tmp_path / name, {"w": torch.ones(2)})
    for module in (report, difference):
        monkeypatch.setattr(module, "describe", describe_once)
    facts = page(tmp_path / "a", tmp_path / "b")
    assert [side["location"] for side in facts["sides"]] == described
    assert described == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_the_layer_of_a_key() -> None:
    assert layer_of("10.weight") == "10"
    assert layer_of("a.b2.c") == "a.b2"
    assert layer_of("optimizer.layers.12.moe.experts.3.w") == "optimizer.layers.12"


# The file.


class Tags(HTMLParser):
    """The tags of a page, its attributes, and the text in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str] = {}
        self.scripts: list[str] = []
        self.inside_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {f"{tag}.{name}": value or "" for name, value in attrs}
        if tag == "script":
            self.scripts.append("")
        self.inside_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self.inside_script = False

    def handle_data(self, data: str) -> None:
        if self.inside_script:
            self.scripts[-1] += data


def hostile(**more: Any) -> Sample:
    """A checkpoint with hostile keys, values and metadata."""
    tensors = {key: np.ones(3, np.float32) for key in HOSTILE}
    texts = {f"text {key}": key for key in HOSTILE}
    return Sample(tensors, objects=texts, metadata=dict(zip(HOSTILE, HOSTILE, strict=True)), **more)


@pytest.mark.parametrize("words", [["run"], ["run/step-00000001"], ["run/step-00000001", "other"]])
def test_hostile_text_is_data_and_nothing_else(
    words: list[str], tmp_path: Path, page: Any, monkeypatch: Any
) -> None:
    top = tmp_path / "top <img src=x> & \u202e"
    write(top / "run" / "step-00000001", hostile(step=1))
    (top / "run" / "step-00000001" / "pinned.json").write_text(json.dumps({"label": HOSTILE[0], "time": 1.0}))
    write(
        top / "other",
        Sample({key: np.zeros(3, np.float32) for key in HOSTILE[:3]}, objects={"text": HOSTILE[0]}),
    )
    places = [top / word for word in words]
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.5)
    assert run(["page", *map(str, places), "-o", str(tmp_path / "p.html")]) == 0
    text = (tmp_path / "p.html").read_bytes().decode("ascii")
    found = Tags(text)
    assert found.tags == [
        *("html", "head", "meta", "meta", "meta", "link", "title", "style"),
        *("body", "noscript", "code", "script", "script"),
    ]
    data, script = found.scripts
    assert not set("<>&") & set(data)
    facts, again = json.loads(data), page(*places)
    for each in (facts, again):
        each.get("examination", {}).pop("free", None)  # another process may write meanwhile
    assert facts == again
    assert HOSTILE[0] in json.dumps(facts, ensure_ascii=False) and HOSTILE[0] not in text
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].split("; ") == [
        *(
            "default-src 'none'",
            "style-src 'unsafe-inline'",
            f"script-src 'sha256-{digest}'",
            "img-src data:",
        ),
        *("base-uri 'none'", "form-action 'none'"),
    ]


def test_the_page_names_no_other_place(tmp_path: Path) -> None:
    write(tmp_path, sample(1))
    page = html_of(checkpoint_facts(describe(LocalStorage(tmp_path)))).decode()
    found = Tags(page)
    assert {found.attributes.get(name) for name in ("link.href", "script.src", "img.src")} == {"data:,", None}
    assert re.findall(r"\w+://[^\"' ]+", page) == ["http://www.w3.org/2000/svg"], "a name, and no place"
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|WebSocket|import\(|innerHTML|eval\(", page)


def test_ten_thousand_tensors_fit_into_a_mail() -> None:
    count, ranks = 10_000, 64
    names = ("attention.wq.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")
    keys = sorted(f"model.layers.{at // 4}.{names[at % 4]}" for at in range(count))
    rows = np.arange(count * ranks)
    file = rows % ranks
    table = ChunkTable(
        tensor=rows // ranks,
        file=file,
        byte_start=rows * 128,
        byte_count=np.full(len(rows), 128),
        digest=np.ones((len(rows), 2), np.uint64),
        box_start=np.arange(len(rows) + 1) * 2,
        box_offsets=np.stack([file * 4, 0 * file], axis=1).reshape(-1),
        box_sizes=np.tile([4, 8], len(rows)),
    )
    digest = 32 * "0"
    manifest = Manifest(
        writer="test",
        attempt="a1",
        step=1,
        time=1.0,
        world_size=ranks,
        metadata={},
        tensors=tuple(TensorRecord(key, "float32", (4 * ranks, 8)) for key in keys),
        aliases={},
        objects={},
        files=tuple(
            FileRecord(f"shards/{rank:05d}-a1.safetensors", 1, digest, 0, rank) for rank in range(ranks)
        ),
        index=FileRecord("index-a1.safetensors", 1, digest),
    )
    facts = checkpoint_facts(Stored("/run", "shardproof", manifest, table))
    assert len(facts["tensors"]) == count and len(facts["layouts"]) == 1
    assert len(html_of(facts)) < 2_000_000


# The command.


def test_a_page_replaces_only_an_older_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "step", sample(1))
    out, data, other = (tmp_path / name for name in ("page.html", "page.json", "weights.safetensors"))
    other.write_bytes(b"precious")
    for _ in range(2):
        assert run(["page", str(tmp_path / "step"), "-o", str(out)]) == 0
        assert run(["page", str(tmp_path / "step"), "-o", str(data), "--json"]) == 0
    assert out.read_bytes().startswith(html_file.HTML_START)
    assert json.loads(data.read_bytes())["page"] == "checkpoint"
    capsys.readouterr()
    for target, options in (
        (other, []),
        (data, []),
        (out, ["--json"]),
        (tmp_path, []),
        (tmp_path / "no" / "p", []),
    ):
        assert run(["page", str(tmp_path / "step"), "-o", str(target), *options]) == 2
        assert str(target) in capsys.readouterr().err or target.name == "p"
    assert other.read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "page.json", "step", other.name]


def test_a_page_goes_to_standard_output(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write(tmp_path, sample(1))
    assert run(["page", str(tmp_path), "-o", "-"]) == 0
    assert capfdbinary.readouterr().out.startswith(html_file.HTML_START)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["RUN"], "name the file"),
        (["RUN/step-00000001", "-o", "x", "--mtbf", "1h"], "--mtbf is for the page of a run"),
        (
            ["RUN", "-o", "x", "--verify"],
            "--verify is for the page of a checkpoint, and this is the page of a run",
        ),
        (
            ["RUN", "1", "-o", "x", "--other-format", "dcp"],
            "--other-format is for the page of two checkpoints",
        ),
        (["RUN", "9", "-o", "x"], "has no step 9"),
        (["RUN", "RUN/step-00000001", "-o", "x"], "this is a run: give a step"),
        (["RUN/step-00000001", "RUN", "-o", "x"], "this is a run: give a step"),
        (["RUN/step-00000001", "nowhere", "-o", "x"], "nowhere"),
    ],
)
def test_bad_usage_of_page(
    words: list[str], text: str, busy_run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(busy_run)
    assert run(["page", *(word.replace("RUN", str(busy_run)) for word in words)]) == 2
    assert text in capsys.readouterr().err


def test_a_step_of_a_run_has_a_page(page: Any, busy_run: Path) -> None:
    facts = page(busy_run, 2)
    assert (facts["page"], facts["summary"]["step"]) == ("checkpoint", 2)


def test_a_place_without_a_checkpoint_has_no_page(tmp_path: Path, capsys: Any) -> None:
    assert run(["page", str(tmp_path), "-o", str(tmp_path / "x")]) == 1
    assert "no committed checkpoint" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_deeply_nested_values_have_a_page(tmp_path: Path) -> None:
    write(tmp_path, sample(1))
    stored, nested = describe(LocalStorage(tmp_path)), list[Any]()
    for _ in range(2_000):
        nested = [nested]
    manifest = msgspec.structs.replace(stored.manifest, objects={"deep": nested, "flat": 1})
    facts = checkpoint_facts(replace(stored, manifest=manifest))
    assert facts["values"] == {"deep": "nested too deep to show", "flat": "1"}
