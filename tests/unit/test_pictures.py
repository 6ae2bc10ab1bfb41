"""The pictures of the documentation are those that their code draws, and a page shows each."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures import PICTURES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_the_file_is_what_the_code_draws(draw: type) -> None:
    path = FOLDER / f"{draw.__name__}.svg"
    assert path.read_text() == draw().svg(), "python -m tools.pictures writes it again"


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_a_picture_has_a_title_and_colours_for_dark_systems(draw: type) -> None:
    text = draw().svg()
    tree = ElementTree.fromstring(text)
    assert tree.find("{http://www.w3.org/2000/svg}title") is not None
    styled = set(re.findall(r"\.([\w-]+)[ {]", text.partition("@media(prefers-color-scheme:dark)")[2]))
    used = {name for names in re.findall(r'class="([^"]+)"', text) for name in names.split()}
    assert used and used <= styled


def test_every_file_is_drawn_and_shown_with_a_description() -> None:
    shown = {
        (page.parent / target).resolve(): words
        for page in PAGES
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", page.read_text())
    }
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in shown}
    assert all(words for words in shown.values())
    assert {f"{draw.__name__}.svg" for draw in PICTURES} <= {path.name for path in FOLDER.iterdir()}
