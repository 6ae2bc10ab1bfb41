"""The page of a run, of a checkpoint, or of two: its facts, and one HTML file with them.

Read `facts_of_run.py`, `facts_of_checkpoint.py` and `facts_of_difference.py`, then `html_file.py`.
"""

from __future__ import annotations

from shardproof.commands.report.page.facts_of_checkpoint import checkpoint_facts
from shardproof.commands.report.page.facts_of_difference import difference_facts
from shardproof.commands.report.page.facts_of_run import run_facts
from shardproof.commands.report.page.html_file import HTML_START, JSON_START, html_of, json_of

__all__ = [
    "HTML_START",
    "JSON_START",
    "checkpoint_facts",
    "difference_facts",
    "html_of",
    "json_of",
    "run_facts",
]
