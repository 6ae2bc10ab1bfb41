"""tests/README.md and SECURITY.md name tests that exist, and CONTRIBUTING.md all folders of tests."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LISTED = set(re.findall(r"`((?:\w+/)+test_\w+\.py)`", (TESTS / "README.md").read_text()))
NAMED = set(re.findall(r"`tests/((?:\w+/)+test_\w+\.py)`", (TESTS.parent / "SECURITY.md").read_text()))


def test_every_listed_file_exists_and_has_tests() -> None:
    assert len(LISTED) > 40 and len(NAMED) > 10
    for name in LISTED | NAMED:
        assert "\ndef test_" in (TESTS / name).read_text(), name


def test_every_fault_and_scenario_is_listed_or_named_here() -> None:
    """A file that is not a guarantee by itself is named below, so that none is forgotten."""
    others = {
        "faults/test_rendezvous_launchers.py",  # connect under torchrun
        "faults/test_save_interrupted.py",  # part of what test_interrupts promises
        "scenarios/test_model_only_and_optimizer_only.py",
        "scenarios/test_rerun_beside_training.py",
        "scenarios/test_run_path_not_utf8.py",
        "scenarios/test_structure_changes.py",
        "scenarios/test_suspect_checkpoints.py",
    }
    present = {
        path.relative_to(TESTS).as_posix()
        for folder in ("faults", "scenarios")
        for path in (TESTS / folder).glob("test_*.py")
    }
    assert present - LISTED == others


def test_contributing_names_every_folder_of_tests() -> None:
    named = re.findall(r"^\| `tests/(\w+)` \|", (TESTS.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    folders = [path.name for path in TESTS.iterdir() if (path / "__init__.py").exists()]
    assert sorted(named) == sorted(folders)
