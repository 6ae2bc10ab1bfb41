"""The pages of docs/tutorials that need torch alone: their commands run, with the output that they show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.tutorials import FOLDER, Command, commands_for, follow, steps_of

ELSEWHERE = {"huggingface", "megatron"}
"""Pages that need a framework: tests/interop/test_tutorials.py."""
pytestmark = [pytest.mark.timeout(400)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({page.stem for page in FOLDER.glob("*.md")} - ELSEWHERE))
def test_the_commands_of_a_page(name: str, tmp_path: Path) -> None:
    python = sys.executable
    programs = commands_for(
        tmp_path / "programs",
        torchrun=[python, "-m", "torch.distributed.run"],
        shardproof=[python, "-m", "shardproof"],
        python=[python],
    )
    folder = tmp_path / "reader"
    folder.mkdir()
    assert len(follow(FOLDER / f"{name}.md", folder, programs)) >= 5


def test_a_wrong_output_and_a_failing_command_are_found(tmp_path: Path) -> None:
    programs = commands_for(tmp_path / "programs", nothing=["/bin/true"])
    page = tmp_path / "page.md"
    for text, problem in (
        ("```console\n$ echo one\none\n$ echo two\n...wo\n```\n", None),
        ("```console\n$ echo one\ntwo\n```\n", "--- found\none"),
        ("```console\n$ false\n```\n", "code 1"),
        ('```python title="a"\nx\n```\n```console\n$ cat a\ny\n```\n', "--- found\nx"),
    ):
        page.write_text(text)
        if problem is None:
            assert follow(page, tmp_path, programs) == ["echo one", "echo two"]
        else:
            with pytest.raises(AssertionError, match=problem):
                follow(page, tmp_path, programs)


def test_lines_of_examples_are_those_of_the_example() -> None:
    """A block of Python without a title shows lines of the example that its page links to."""
    for name in sorted(ELSEWHERE):
        page = (FOLDER / f"{name}.md").read_text()
        (example,) = set(re.findall(r"\]\(\.\./\.\./(examples/\w+\.py)\)", page))
        lines = (FOLDER.parents[1] / example).read_text().splitlines()
        shown = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)).splitlines()
        assert shown and [line for line in shown if line not in lines] == []


def test_every_page_has_commands() -> None:
    for page in FOLDER.glob("*.md"):
        assert sum(isinstance(step, Command) for step in steps_of(page.read_text())) >= 4, page.name
