"""The examples of the documentation run: docstrings, and every Python block of README.md and docs/."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import Outcome, run_ranks

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Started by their launcher, or written as a pytest suite: not modules that a person imports.
NOT_IMPORTED = {"__main__", "conformance"}


def module_names() -> list[str]:
    """Every module whose path has no underscore at the start of a part, and `_utils`."""
    names = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if not any((part.startswith("_") and part != "_utils") or part in NOT_IMPORTED for part in parts):
            names.append(".".join(parts))
    return names


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if not name.startswith("shardproof.frameworks."):
            raise
        pytest.skip(f"a framework is not installed: {error}")
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(module, optionflags=flags)
    assert result.failed == 0, (
        f"{result.failed} of {result.attempted} examples of {name} fail (see the output)"
    )


@dataclass(frozen=True)
class Block:
    """One fenced Python block of a page."""

    line: int
    """The line of its first statement, counted from 1."""
    text: str


def python_blocks(text: str) -> list[Block]:
    """The blocks between a line that is exactly ```python and the next ```."""
    blocks: list[Block] = []
    lines: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if lines is None:
            if line.rstrip() == "```python":
                lines, start = [], number + 1
        elif line.rstrip() == "```":
            blocks.append(Block(start, "\n".join(lines) + "\n"))
            lines = None
        else:
            lines.append(line)
    assert lines is None, "a block is not closed"
    return blocks


def paste(blocks: list[Block], page: str, folder: str) -> None:
    """Runs the blocks in turn in one namespace, as a reader would paste them, and ends this process.

    A block that starts with a prompt is run as a doctest, so that its output is checked. The output of this
    process goes to the file "output" of `folder`.
    """
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(folder)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    names = {"__name__": "__main__"}
    try:
        for block in blocks:
            if block.text.startswith(">>> "):
                test = doctest.DocTestParser().get_doctest(block.text, names, page, page, block.line - 1)
                test.globs = names
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                failed, _ = doctest.DocTestRunner(optionflags=flags).run(test, clear_globs=False)
                assert not failed, f"{page}, line {block.line}: output differs"
            else:
                exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_blocks(blocks: list[Block], page: str, folder: Path) -> tuple[Outcome, str]:
    """Runs the blocks in a process of their own. Returns its end, and its output with the traceback."""
    temporary = {"TMPDIR": str(folder)}
    (outcome,) = run_ranks(1, paste, blocks, page, str(folder), timeout=120, environment=temporary)
    return outcome, (folder / "output").read_text() + outcome.trace


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_python_blocks_of_a_page(page: Path, tmp_path: Path) -> None:
    blocks = python_blocks(page.read_text())
    if not blocks:
        pytest.skip("no Python block")
    outcome, output = run_blocks(blocks, str(page.relative_to(ROOT)), tmp_path)
    assert outcome.exit_code == 0 and outcome.error is None, output


def test_the_readme_has_an_example() -> None:
    assert python_blocks((ROOT / "README.md").read_text())


def test_the_targets_of_links_between_pages_exist() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


# The checks themselves: a block that fails is a failure, and blocks share their names.


def test_a_failing_block_is_found(tmp_path: Path) -> None:
    blocks = python_blocks("text\n```python\nx = 1\n```\n```python\nassert x == 2\n```\n")
    outcome, output = run_blocks(blocks, "page.md", tmp_path)
    assert isinstance(outcome.error, AssertionError)
    assert 'File "page.md", line 6' in output


@pytest.mark.parametrize("output", ["2", "3"])
def test_a_wrong_output_is_found(output: str, tmp_path: Path) -> None:
    blocks = python_blocks(f"```python\n>>> 1 + 1\n{output}\n```\n")
    outcome, _ = run_blocks(blocks, "page.md", tmp_path)
    assert (outcome.error is None) == (output == "2")


def test_blocks_share_their_names(tmp_path: Path) -> None:
    blocks = python_blocks("```python\nx = 1\n```\n```python\n>>> x + 1\n2\n```\n")
    outcome, output = run_blocks(blocks, "p.md", tmp_path)
    assert outcome.error is None, output
