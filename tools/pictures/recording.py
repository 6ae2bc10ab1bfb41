"""The picture of `make demo`: a terminal that plays what `record.py` has recorded."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

from tools.pictures.drawing import Drawing

__all__ = ["demo"]

CAST = Path(__file__).with_name("demo.cast")
ROWS, LINE, TOP, LEFT = 24, 15, 44, 18
"""Rows of the terminal, and its measures in pixels."""
SECONDS = {"progress": 0.4, "report": 0.25, "end": 8.0}
"""How long the picture stays after a line; `end`: after the last one."""
STYLES = {"1": 'font-weight="600"', "2": 'class="faint"', "32": 'class="yes"', "31": 'class="no"'}
"""Codes of terminals, as attributes."""
RULES = (
    ".yes{fill:#1f7a35}.no{fill:#c0392b}"
    "@media(prefers-color-scheme:dark){.yes{fill:#6fcf7f}.no{fill:#ff8a80}}"
    "tspan.faint{fill-opacity:.85}"
    ".screen text{white-space:pre;"
    "font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
)


def lines() -> list[tuple[str, str]]:
    """The lines of the recording, each with its kind: `progress` or `report`.

    Raises:
        ValueError: a line does not fit into the terminal.
    """
    header, *events = map(json.loads, CAST.read_text().splitlines())
    found = []
    for _, _, text in events:
        for line in text.replace("\r", "").removesuffix("\n").split("\n"):
            bare = re.sub(r"\x1b\[[\d;]*m", "", line)
            kind = "progress" if re.match(r"[a-z0-9-]+  \S", bare) else "report"
            found.append((kind, line.rstrip()))
            if len(bare.rstrip()) > header["width"]:
                raise ValueError(f"a line is longer than {header['width']} columns: {bare}")
    return found


def spans(line: str) -> str:
    """One line with the styles of its codes."""
    parts = []
    attributes = ""
    for number, part in enumerate(re.split(r"\x1b\[([\d;]*)m", line)):
        if number % 2:
            attributes = " ".join(STYLES[code] for code in part.split(";") if code in STYLES)
        elif part:
            parts.append(f"<tspan {attributes}>{escape(part)}</tspan>" if attributes else escape(part))
    return "".join(parts)


def demo() -> Drawing:
    """The terminal. Each line appears in the last row, and the others move up."""
    shown = [("progress", "$ make demo"), *lines()]
    drawing = Drawing(
        900, TOP + ROWS * LINE + 16, "make demo: trains, is killed in a save, resumes on 3 and on 1 ranks"
    )
    waits = [SECONDS[kind] for kind, _ in shown[:-1]] + [SECONDS["end"]]
    frames, now = [], 0.0
    for number, wait in enumerate(waits):
        frames.append(
            f"{100 * now / sum(waits):.2f}%{{transform:translateY({(ROWS - 1 - number) * LINE}px)}}"
        )
        now += wait
    last = (ROWS - len(shown)) * LINE
    drawing.rules = (
        f"{RULES}.lines{{transform:translateY({last}px)}}@keyframes play{{{''.join(frames)}"
        f"100%{{transform:translateY({last}px)}}}}"
        f"@media(prefers-reduced-motion:no-preference)"
        f"{{.lines{{animation:play {sum(waits):.1f}s step-end infinite}}}}"
    )
    for number, colour in enumerate(("bad", "wait", "good")):
        drawing.box(LEFT + number * 20, 14, 12, 12, colour, radius=6)
    drawing.text(450, 25, "make demo", "faint", anchor="middle")
    drawing.parts += [
        f'<clipPath id="window"><rect x="0" y="{TOP - 2}" width="900" height="{ROWS * LINE}"/></clipPath>',
        '<g class="screen" clip-path="url(#window)"><g class="lines">',
        *(
            f'<text class="ink" x="{LEFT}" y="{TOP + (number + 1) * LINE - 6}">{spans(line)}</text>'
            for number, (_, line) in enumerate(shown)
            if line
        ),
        "</g></g>",
    ]
    return drawing
