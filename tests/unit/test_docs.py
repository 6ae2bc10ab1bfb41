"""The examples of the documentation run: docstrings, and every Python block of README.md and docs/."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""Pages whose blocks run. `tests.tutorials` runs those of docs/tutorials."""
SECONDS_A_PAGE = 120

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
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(module, name):
        if test.examples:  # a run without any is slow, too
            runner.run(test)
    result = runner.summarize(verbose=False)
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


def as_script(blocks: list[Block]) -> str:
    """One program that runs the blocks in turn in one namespace, as a reader would paste them.

    A block that starts with a prompt is run as a doctest, so that what it prints is checked.
    """
    return (
        "import doctest, sys\n"
        "page, names = sys.argv[1], {'__name__': '__main__'}\n"
        f"for line, text in {[(block.line, block.text) for block in blocks]!r}:\n"
        "    if text.startswith('>>> '):\n"
        "        test = doctest.DocTestParser().get_doctest(text, names, page, page, line - 1)\n"
        "        test.globs = names\n"
        "        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE\n"
        "        failed, _ = doctest.DocTestRunner(optionflags=flags).run(test, clear_globs=False)\n"
        "        assert not failed, f'{page}, line {line}: output differs'\n"
        "    else:\n"
        "        exec(compile('\\n' * (line - 1) + text, page, 'exec'), names)\n"
    )


def modules_used(text: str) -> tuple[set[str], set[str]]:
    """The dotted names that a program uses of what it imports, and the modules that it imports."""
    tree = ast.parse(text)
    imported: set[str] = set()
    roots: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported |= set(accumulate(alias.name.split("."), "{}.{}".format))
                first = alias.name.partition(".")[0]
                roots[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            imported |= set(accumulate((node.module or "").split("."), "{}.{}".format))
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            roots |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    used: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in roots:
            used |= set(accumulate([roots[node.id], *names], "{}.{}".format))
    return used, imported


@pytest.mark.processes
def test_every_page_imports_the_modules_that_it_uses() -> None:
    """`run_blocks` cannot show this, because its process has imported more than a new interpreter."""
    fresh = "import sys, torch, shardproof; print(*sys.modules)"
    present = set(subprocess.check_output([sys.executable, "-c", fresh], text=True, timeout=120).split())
    used, imported = modules_used(
        "import torch\ntorch.distributed.fsdp.fully_shard(1)\nfrom torch import nn\nnn.init"
    )
    assert used >= {"torch.distributed.fsdp", "torch.nn.init"} and imported == {"torch", "torch.nn"}
    assert "torch.distributed.fsdp" not in present and "torch.nn.init" in present
    lacking = {}
    for page in PAGES:
        text = "".join(block.text for block in python_blocks(page.read_text()) if ">>> " not in block.text)
        used, imported = modules_used(text)
        lazy = {name for name in used if name.startswith("shardproof.")}  # these import themselves
        modules = {name for name in used - lazy - present - imported if is_module(name)}
        if modules:
            lacking[page.name] = modules
    assert not lacking


def is_module(name: str) -> bool:
    """True for the name of a module that can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def run_blocks(blocks: list[Block], page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs blocks in a process that has imported torch."""
    environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    return run_program(
        as_script(blocks), page, folder=folder, environment=environment, timeout=SECONDS_A_PAGE
    )


def run_blocks_afresh(blocks: list[Block], page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs blocks in a new interpreter, which has imported nothing: a block that lacks an import fails."""
    environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", as_script(blocks), page],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_A_PAGE,
        check=False,
    )


Runner = Callable[[list[Block], str, Path], subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("page", PAGES[1:], ids=[str(page.relative_to(ROOT)) for page in PAGES[1:]])
@pytest.mark.parametrize("run", [run_blocks, pytest.param(run_blocks_afresh, marks=pytest.mark.slow)])
def test_python_blocks_of_a_page(page: Path, run: Runner, tmp_path: Path) -> None:
    blocks = python_blocks(page.read_text())
    if not blocks:
        pytest.skip("no Python block")
    done = run(blocks, str(page.relative_to(ROOT)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
def test_the_example_of_the_readme_goes_on_where_it_ended(tmp_path: Path) -> None:
    blocks = python_blocks((ROOT / "README.md").read_text())
    assert blocks
    for number, run in enumerate((run_blocks_afresh, run_blocks), 1):
        done = run(blocks, "README.md", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "runs" / "example" / f"step-{number:08d}").is_dir()


def test_the_targets_of_links_between_pages_exist() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


# The checks themselves: a block that fails is a failure, and blocks share their names.


@pytest.mark.processes
def test_a_failing_block_is_found(tmp_path: Path) -> None:
    blocks = python_blocks("text\n```python\nx = 1\n```\n```python\nassert x == 2\n```\n")
    done = run_blocks(blocks, "page.md", tmp_path)
    assert done.returncode != 0
    assert 'File "page.md", line 6' in done.stderr


@pytest.mark.processes
def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    assert run_blocks(python_blocks("```python\n>>> 1 + 1\n2\n```\n"), "page.md", tmp_path).returncode == 0
    assert run_blocks(python_blocks("```python\n>>> 1 + 1\n3\n```\n"), "page.md", tmp_path).returncode != 0


@pytest.mark.processes
def test_blocks_share_their_names(tmp_path: Path) -> None:
    done = run_blocks(
        python_blocks("```python\nx = 1\n```\n```python\n>>> x + 1\n2\n```\n"), "p.md", tmp_path
    )
    assert done.returncode == 0, done.stderr
