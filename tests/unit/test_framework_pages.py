"""The diffs of docs/frameworks show lines of the examples, which tests/interop runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def diffs(page: Path) -> list[str]:
    return re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)


def test_migrate_has_the_diffs_of_all_pages() -> None:
    pages = sorted((ROOT / "docs" / "frameworks").glob("*.md"))
    found = {page.name: diffs(page) for page in pages}
    assert [name for name, blocks in found.items() if not blocks] == []
    migrate = diffs(ROOT / "docs" / "migrate.md")
    assert sorted(migrate) == sorted(block for blocks in found.values() for block in blocks)


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("lightning.md", "lightning_fit.py"),
        ("transformers.md", "hf_trainer.py"),
        ("accelerate.md", "accelerate_loop.py"),
        ("dcp.md", "dcp.py"),
        ("torch.md", "torch_loop.py"),
        ("deepspeed.md", "deepspeed_zero.py"),
        ("megatron_core.md", "megatron.py"),
        ("megatron_fsdp.md", "megatron_fsdp.py"),
        ("huggingface.md", "hf_meta.py"),
    ],
)
def test_added_lines_are_those_of_the_example(page: str, example: str) -> None:
    diff = diffs(ROOT / "docs" / "frameworks" / page)[0]
    lines = (ROOT / "examples" / example).read_text().splitlines()
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert added
    assert [line for line in added if line not in lines] == []
    assert len(lines) <= 40


@pytest.mark.parametrize("example", ["wandb_run.py", "mlflow_run.py"])
def test_the_page_of_trackers_shows_lines_of_the_examples(example: str) -> None:
    section = (ROOT / "docs" / "trackers.md").read_text().partition(f"[examples/{example}]")[2]
    block = re.search(r"```py\n(.*?)```", section, re.DOTALL)
    assert block is not None
    assert block[1] in (ROOT / "examples" / example).read_text()
