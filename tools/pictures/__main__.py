"""Writes every picture."""

from pathlib import Path

from tools.pictures import PICTURES

folder = Path(__file__).resolve().parents[2] / "docs" / "pictures"
folder.mkdir(exist_ok=True)
for draw in PICTURES:
    (folder / f"{draw.__name__}.svg").write_text(draw().svg())
