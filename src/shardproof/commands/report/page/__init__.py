"""The page of a run, of a checkpoint, or of two: its facts, and one HTML file with them.

Read `run_facts.py`, `checkpoint_facts.py` and `difference_facts.py` for the facts, then `html_file.py`.
"""

from __future__ import annotations

from shardproof.commands.report.page.checkpoint_facts import checkpoint_facts
from shardproof.commands.report.page.difference_facts import difference_facts
from shardproof.commands.report.page.html_file import HTML_START, JSON_START, html_of, json_of
from shardproof.commands.report.page.run_facts import run_facts

__all__ = [
    "HTML_START",
    "JSON_START",
    "checkpoint_facts",
    "difference_facts",
    "html_of",
    "json_of",
    "run_facts",
]
