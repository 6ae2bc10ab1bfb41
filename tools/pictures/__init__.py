"""The pictures of the documentation, as code: `python -m tools.pictures` writes them to docs/pictures.

`python -m tools.pictures.record` records `make demo` again, for the picture of it.
"""

from __future__ import annotations

from tools.pictures.diagrams import hybrid_step, rerun
from tools.pictures.layouts import layouts, reshard
from tools.pictures.recording import demo
from tools.pictures.saves import restart, save, tiers

__all__ = ["PICTURES"]

PICTURES = (demo, hybrid_step, layouts, rerun, reshard, restart, save, tiers)
"""Each draws the picture that has its name."""
