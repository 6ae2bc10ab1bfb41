"""Checkpoints that earlier versions wrote are read as the same values, in every way that the package reads.

`python -m tests.golden.write` wrote them; `expected.json` beside each says what a reader finds. A failure
here means that a checkpoint of a user cannot be read, or is read as something else: the package is wrong, not
the files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.cli import main
from tests.golden import states
from tests.golden.reader import BLOCK, ITEMSIZE, read
from tests.golden.write import DIGESTS, GOLDEN, RUNS, digests

EXPECTED = {name: json.loads((GOLDEN / name / "expected.json").read_text()) for name in RUNS}
FOLDERS = [(name, folder) for name, expected in EXPECTED.items() for folder in expected["folders"]]

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, unpacked."""
    root = tmp_path_factory.mktemp("golden")
    for name in RUNS:
        if (GOLDEN / name / "run").exists():
            shutil.copytree(GOLDEN / name / "run", root / name / "run")
        else:
            with tarfile.open(GOLDEN / name / "run.tar.xz") as packed:
                packed.extractall(root / name, filter="data")
    return root


@pytest.fixture
def generators() -> Iterator[None]:
    """Restores the generators of the process after the test."""
    random = sp.RandomState()
    before = random.state_dict()
    yield
    random.load_state_dict(before)


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([*arguments, "--json"])
    assert isinstance(left.value.code, int)
    text = capsys.readouterr().out
    return left.value.code, json.loads(text) if text else None


def bytes_of(expected: dict[str, Any]) -> int:
    """Bytes of all chunks."""
    return sum(chunk[4] - chunk[3] for tensor in expected["tensors"].values() for chunk in tensor["chunks"])


def test_the_committed_files_are_unchanged() -> None:
    assert digests(GOLDEN) == json.loads((GOLDEN / DIGESTS).read_text())


def test_git_leaves_the_files_as_they_are() -> None:
    attributes = (GOLDEN.parents[1] / ".gitattributes").read_text().splitlines()
    for pattern in ("tests/golden/**/run/**", "tests/golden/**/*.tar.xz"):
        assert f"{pattern} binary" in attributes


def test_there_are_checkpoints_of_both_versions_by_one_and_two_ranks() -> None:
    made = {
        (entry["version"], entry["world_size"]) for e in EXPECTED.values() for entry in e["folders"].values()
    }
    assert made == {(1, 1), (1, 2), (2, 1), (2, 2)}


@pytest.mark.parametrize(("name", "folder"), FOLDERS)
def test_the_files_are_what_the_format_says(name: str, folder: str, originals: Path) -> None:
    """The reader that shares no code with the package finds what it found when the files were written."""
    found, expected = read(originals / name / "run" / folder), EXPECTED[name]["folders"][folder]
    for member in ("version", "step", "world_size", "repaired", "attempt", "files", "tensors", "aliases"):
        assert found[member] == expected[member]
    assert found["objects"].keys() == expected["objects"].keys()


def shown(keys: Iterable[str]) -> list[str]:
    """The keys without those of tensors that hold the bytes of a plain value."""
    return [key for key in keys if not key.endswith((".@data", ".numpy.state.key", ".python.words"))]


@pytest.mark.parametrize(("name", "folder"), FOLDERS)
def test_open_reads_every_value(name: str, folder: str, originals: Path) -> None:
    expected = EXPECTED[name]["folders"][folder]
    tensors, aliases = expected["tensors"], expected["aliases"]
    with sp.open(originals / name / "run" / folder) as checkpoint:
        assert checkpoint.keys() == sorted(shown([*tensors, *aliases, *expected["objects"]]))
        assert checkpoint.step == expected["step"]
        assert states.spelled(checkpoint.metadata) == expected["metadata"]
        for key, tensor in (tensors | {key: tensors[to] for key, to in aliases.items()}).items():
            assert (checkpoint.dtype(key), list(checkpoint.shape(key))) == (tensor["dtype"], tensor["shape"])
            if hasattr(torch, tensor["dtype"]):
                assert states.digest(states.raw(checkpoint[key].read())) == tensor["digest"], key
                check_boxes(checkpoint[key], tensor["chunks"])
        for key, text in expected["objects"].items():
            assert states.spelled(checkpoint[key]) == text, key


def check_boxes(stored: Any, chunks: list[Any]) -> None:
    """Each stored box, read alone, has the recorded digest."""
    for offsets, sizes, _, start, stop, digest in chunks:
        if stop - start <= BLOCK and stored.dtype is not getattr(torch, "float4_e2m1fn_x2", None):
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            assert states.digest(states.raw(stored[box])) == digest, (stored, box)


@pytest.mark.parametrize(("name", "folder"), FOLDERS)
def test_inspect_shows_every_layout(
    name: str, folder: str, originals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, path = EXPECTED[name]["folders"][folder], str(originals / name / "run" / folder)
    code, summary = run_command(capsys, "inspect", path)
    assert code == 0
    for member in ("step", "attempt", "world_size", "repaired"):
        assert summary[member] == expected[member]
    assert summary["tensors"] == len(shown(expected["tensors"]))
    files = expected["files"]
    for key, tensor in expected["tensors"].items():
        code, detail = run_command(capsys, "inspect", path, key)
        assert (code, detail["kind"], detail["stored_as"]) == (0, "tensor", key)
        assert (detail["dtype"], detail["shape"]) == (tensor["dtype"], tensor["shape"])
        names = ("offsets", "sizes", "file", "rank", "byte_start", "byte_stop", "digest")
        assert [[chunk[name] for name in names] for chunk in detail["chunks"]] == [
            [offsets, sizes, files[file][0], files[file][4], *rest]
            for offsets, sizes, file, *rest in sorted(tensor["chunks"])
        ], key
    for key, to in expected["aliases"].items():
        assert run_command(capsys, "inspect", path, key)[1]["stored_as"] == to


@pytest.mark.parametrize(("name", "folder"), FOLDERS)
def test_verify_proves_every_byte(
    name: str, folder: str, originals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = EXPECTED[name]["folders"][folder]
    code, report = run_command(capsys, "verify", str(originals / name / "run" / folder))
    assert (code, report["ok"], report["faults"]) == (0, True, [])
    assert (report["step"], report["files"]) == (expected["step"], len(expected["files"]))
    assert report["chunks"] == sum(len(tensor["chunks"]) for tensor in expected["tensors"].values())
    sizes = (
        ITEMSIZE[entry["dtype"]] * torch.Size(entry["shape"]).numel()
        for entry in expected["tensors"].values()
    )
    assert report["bytes"] == bytes_of(expected) == sum(sizes)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("plain-2", "step-00000001"),
        ("incremental-2", "step-00000003"),
        ("overwritten-1", "step-00000002"),
        ("suspect-1", "suspect-00000003"),
    ],
)
def test_a_flipped_byte_is_found(
    name: str, folder: str, originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first and the last byte of every file, and others in between.

    Of a file of another step: the first and the last byte of each chunk that this step has in it.
    """
    root = shutil.copytree(originals / name / "run", tmp_path / "run")
    expected = EXPECTED[name]["folders"][folder]
    files = {str(path.relative_to(root / folder)) for path in (root / folder).glob("*.*")}
    files |= {place for place, *_ in expected["files"]}
    for place in sorted(files):
        path = root / place if place.startswith("step-") else root / folder / place
        data = path.read_bytes()
        for at in places_in(place, len(data), expected):
            write_byte(path, at, data[at] ^ 1)
            code, report = run_command(capsys, "verify", str(root / folder))
            assert code == 1 and report["faults"], f"byte {at} of {place}"
            write_byte(path, at, data[at])
    assert run_command(capsys, "verify", str(root / folder))[0] == 0


def write_byte(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([value]))


def places_in(place: str, size: int, expected: dict[str, Any]) -> list[int]:
    """Offsets of the bytes to flip. Each flip alone must be found."""
    if not place.startswith("step-"):
        return [0, *range(3, size - 1, 31 if place.endswith(".json") else 401), size - 1]
    row = next(row for row, file in enumerate(expected["files"]) if file[0] == place)
    chunks = [
        chunk for tensor in expected["tensors"].values() for chunk in tensor["chunks"] if chunk[2] == row
    ]
    return [at for _, _, _, start, stop, _ in chunks for at in (start, stop - 1)]


@pytest.mark.parametrize("name", ["plain-1", "plain-2"])
@pytest.mark.usefixtures("generators")
def test_restore_gives_every_value_of_a_plain_state(name: str, originals: Path) -> None:
    target = states.plain(0, 1, blank=True)
    checkpointer = sp.Checkpointer(originals / name / "run")
    exclude = [f"dtypes.{dtype}" for dtype in states.DTYPES if not hasattr(torch, dtype)]
    assert checkpointer.restore(target, exclude=exclude) == 1
    found = dict(states.leaves(target))
    assert found == dict(states.leaves(states.plain(0, 1)))
    assert found != dict(states.leaves(states.plain(0, 1, blank=True)))
    report = checkpointer.last_restore
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert report.dropped == (() if name == "plain-1" else ("per_rank.@rank-1", "rng.@rank-1"))


def test_values_of_ranks_that_do_not_load_are_gathered(originals: Path) -> None:
    state = {"per_rank": sp.PerRank({"losses": [], "cursor": torch.zeros(2)}, fewer="gather")}
    sp.load(originals / "plain-2" / "run" / "step-00000001", state, include="per_rank")
    gathered = state["per_rank"].gathered[1]
    assert gathered["losses"] == [1.5, 0.25]
    assert torch.equal(gathered["cursor"], states.pattern(torch.float32, 2, seed=21))


CHAINS = [
    *((f"incremental-{ranks}", f"step-{step:08d}", step) for ranks in (1, 2) for step in (1, 2, 3)),
    *((f"overwritten-{ranks}", "step-00000001", 11) for ranks in (1, 2)),
    *((f"overwritten-{ranks}", "step-00000002", 2) for ranks in (1, 2)),
    *((f"overwritten-{ranks}", "step-00000003", 13) for ranks in (1, 2)),
    ("standalone-1", "step-00000003", 3),
    ("repaired-1", "step-00000001", 1),
]


@pytest.mark.parametrize(("name", "folder", "value"), CHAINS)
def test_load_and_restore_give_every_value_of_a_step(
    name: str, folder: str, value: int, originals: Path
) -> None:
    expected = dict(states.leaves(states.chain(value, 0, 1)))
    loaded, restored = states.chain(0, 0, 1, blank=True), states.chain(0, 0, 1, blank=True)
    report = sp.load(originals / name / "run" / folder, loaded)
    assert dict(states.leaves(loaded)) == expected
    assert report.step == int(folder[-8:])
    assert report.attempt == EXPECTED[name]["folders"][folder]["attempt"]
    checkpointer = sp.Checkpointer(originals / name / "run")
    assert checkpointer.restore(restored, step=report.step) == report.step
    assert dict(states.leaves(restored)) == expected


@pytest.mark.parametrize("name", RUNS)
def test_steps_and_suspects_are_listed(name: str, originals: Path) -> None:
    checkpointer = sp.Checkpointer(originals / name / "run")
    assert checkpointer.steps() == EXPECTED[name]["steps"]
    assert checkpointer.suspects() == EXPECTED[name]["suspects"]


@pytest.mark.parametrize(
    ("ranks", "suspect", "step"), [(1, False, 1), (1, True, 3), (2, False, 1), (2, True, 3)]
)
@pytest.mark.usefixtures("generators")
def test_a_suspect_is_restored_only_on_request(ranks: int, suspect: bool, step: int, originals: Path) -> None:
    machine = states.machine(pending="refuse" if ranks == 1 else "drop")
    target = states.chain(0, 0, 1, blank=True) | {"rerun": machine}
    checkpointer = sp.Checkpointer(originals / f"suspect-{ranks}" / "run")
    assert checkpointer.restore(target, suspect=suspect) == step
    del target["rerun"]
    assert dict(states.leaves(target)) == dict(states.leaves(states.chain(step, 0, 1)))
    pending = suspect and ranks == 1
    assert machine.state.value == ("will rerun from checkpoint" if pending else "not running")
    assert machine.step == (step - 1 if suspect else step)


def test_a_settled_suspect_is_not_restored(originals: Path) -> None:
    checkpointer = sp.Checkpointer(originals / "suspect-1" / "run")
    assert checkpointer.restore(states.chain(0, 0, 1, blank=True), suspect=True, step=3, strict=False) == 3
    with pytest.raises(sp.NotCommittedError):
        checkpointer.restore(states.chain(0, 0, 1, blank=True), suspect=True, step=2, strict=False)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("generators")
def test_modules_and_optimizers_are_restored_under_the_same_names(ranks: int, originals: Path) -> None:
    name = f"training-{ranks}"
    state = states.training(0, 1, blank=True)
    assert sp.Checkpointer(originals / name / "run").restore(state) == 3
    tensors = EXPECTED[name]["folders"]["step-00000003"]["tensors"]
    aliases = EXPECTED[name]["folders"]["step-00000003"]["aliases"]
    seen: set[str] = set()

    def check(key: str, tensor: torch.Tensor) -> None:
        stored = aliases.get(key, key)
        seen.add(stored)
        rows = tensors[stored]["shape"][0] if tensor.dim() else None
        held = tensor[:rows] if rows is not None else tensor  # a padded vocabulary holds more
        assert states.digest(states.raw(held)) == tensors[stored]["digest"], key

    for module, optimizer in (("model", "optimizer"), ("parallel", "momentum")):
        for key, tensor in state[module].state_dict().items():
            check(f"{module}.{key}", tensor)
        trained = state[optimizer]
        trained = trained.optimizer if isinstance(trained, sp.OptimizerState) else trained
        for key, parameter in state[module].named_parameters(remove_duplicate=False):
            if f"{module}.{key}" not in aliases:
                for slot, tensor in trained.state[parameter].items():
                    check(f"{optimizer}.{key}.{slot}", tensor)
    for name in ("base_lrs", "_last_lr"):
        check(f"schedule.{name}.0", getattr(state["schedule"], name)[0])
    assert seen == tensors.keys()
    assert state["schedule"].last_epoch == 3
    rates = [group["lr"] for group in state["optimizer"].param_groups]
    assert rates == ([0.01, 0.02] if ranks == 1 else [0.01, 0.01])
    assert [group["lr"] for group in state["momentum"].optimizer.param_groups] == [0.125]


@pytest.mark.parametrize("stem", ["plain", "training"])
def test_two_ranks_stored_the_same_tensors_as_one(stem: str) -> None:
    """Only per-rank values differ, and values that distributed training rounds in another way."""
    one, two = (EXPECTED[f"{stem}-{ranks}"]["folders"] for ranks in (1, 2))
    for folder, expected in one.items():
        for key, tensor in expected["tensors"].items():
            same = two[folder]["tensors"][key]
            assert (tensor["dtype"], tensor["shape"]) == (same["dtype"], same["shape"]), key
            if not key.startswith(("model.", "optimizer.")):
                assert tensor["digest"] == same["digest"], key


def test_chunks_of_several_blocks_are_restored(originals: Path) -> None:
    target = states.blocks(blank=True)
    assert sp.Checkpointer(originals / "blocks-1" / "run").restore(target) == 1
    assert dict(states.leaves(target)) == dict(states.leaves(states.blocks()))
    path = originals / "blocks-1" / "run" / "step-00000001"
    with sp.open(path) as checkpoint:
        part = checkpoint["two_blocks"][200:, 100:]  # in the second block, too
    assert torch.equal(part, states.blocks()["two_blocks"][200:, 100:])


@pytest.mark.parametrize("stem", ["plain", "incremental", "blocks"])
@pytest.mark.usefixtures("generators")
def test_the_same_state_is_written_as_the_same_chunks(stem: str, originals: Path, tmp_path: Path) -> None:
    """Keys, boxes, digests, order and place of what one rank writes. Only attempts and times differ."""
    if not all(hasattr(torch, dtype) for dtype in states.DTYPES):
        pytest.skip("this torch lacks a dtype that the files have")
    RUNS[f"{stem}-1"][1](tmp_path, 0, 1)
    for folder, expected in EXPECTED[f"{stem}-1"]["folders"].items():
        written = read(tmp_path / folder)
        attempts = dict(zip(attempts_of(expected), attempts_of(written), strict=True))
        for member in ("version", "step", "world_size", "repaired", "tensors", "aliases"):
            assert written[member] == expected[member], member
        before = read(originals / f"{stem}-1" / "run" / folder)
        assert written["metadata"].pop("@provenance")  # a newer member
        assert (written["objects"], written["metadata"]) == (before["objects"], before["metadata"])
        assert [file[0] for file in written["files"]] == [
            renamed(file[0], attempts) for file in expected["files"]
        ]
        assert [(file[1], file[3], file[4]) for file in written["files"]] == [
            (file[1], file[3], file[4]) for file in expected["files"]
        ]


@pytest.mark.usefixtures("generators")
def test_modules_and_optimizers_are_written_under_the_same_names(originals: Path, tmp_path: Path) -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("another torch may give its optimizers other options than that of the files")
    RUNS["training-1"][1](tmp_path, 0, 1)
    before, written = (read(run / "step-00000003") for run in (originals / "training-1" / "run", tmp_path))
    for key, value in written["objects"].items():
        if key.endswith(".@options"):
            assert key.startswith(value.pop("optimizer"))  # newer members
            value.pop("torch_name", None)
    assert (written["objects"], written["aliases"]) == (before["objects"], before["aliases"])
    kinds = [
        {key: (t["dtype"], t["shape"]) for key, t in one["tensors"].items()} for one in (before, written)
    ]
    assert kinds[0] == kinds[1]


def attempts_of(entry: dict[str, Any]) -> list[str]:
    return [
        place.rpartition("/")[2].partition("-")[2].removesuffix(".safetensors")
        for place, *_ in entry["files"]
    ]


def renamed(place: str, attempts: dict[str, str]) -> str:
    for before, after in attempts.items():
        place = place.replace(before, after)
    return place


def test_a_change_of_a_committed_file_is_found(tmp_path: Path) -> None:
    copy = shutil.copytree(GOLDEN / "incremental-1", tmp_path / "incremental-1")
    table = json.loads((GOLDEN / DIGESTS).read_text())
    assert digests(tmp_path).items() <= table.items()
    (copy / "expected.json").write_text("{}")
    assert not digests(tmp_path).items() <= table.items()
    assert hashlib.sha256(b"{}").hexdigest() in digests(tmp_path).values()
