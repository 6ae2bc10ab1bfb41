"""docs/failures.md describes every public error."""

from __future__ import annotations

import re
from pathlib import Path

import shardproof
from shardproof import errors

PAGE = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
ERRORS = {name for name in errors.__all__ if name != errors.ShardproofError.__name__}


def test_every_error_has_a_section_and_a_row() -> None:
    sections = set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    assert sections == ERRORS
    rows = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} == ERRORS
    assert all(link == name.lower() for name, link in rows)


def test_every_error_is_public() -> None:
    assert set(errors.__all__) <= set(shardproof.__all__)
    tree = {errors.ShardproofError}
    while found := {child for known in tree for child in known.__subclasses__()} - tree:
        tree |= found
    assert {kind.__name__ for kind in tree if kind.__module__ == errors.__name__} == set(errors.__all__)
