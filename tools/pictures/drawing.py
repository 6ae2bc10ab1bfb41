"""A drawing of boxes, texts and arrows as SVG, with colours for light and dark systems."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["Drawing"]

COLOURS = {
    "paper": ("#ffffff", "#1b1f26"),
    "ink": ("#1f2933", "#e3e8ee"),
    "faint": ("#5b6875", "#9aa7b4"),
    "line": ("#b9c3cd", "#475260"),
    "plain": ("#eef1f4", "#2a313b"),
    "rank0": ("#a9cbf5", "#2d5a8f"),
    "rank1": ("#ffd18f", "#8a5a17"),
    "rank2": ("#b5e0b0", "#2f6a38"),
    "rank3": ("#e3bdf0", "#6d3f82"),
    "good": ("#b5e0b0", "#2f6a38"),
    "bad": ("#f6b9b3", "#8c352e"),
    "wait": ("#ffd18f", "#8a5a17"),
}
"""Each colour on a light and on a dark system."""

STROKES = ("line", "ink", "good", "bad")
SIZE = 13
"""Height of the text, in pixels."""


def _rules(scheme: int) -> str:
    """The colours of one scheme as rules of CSS."""
    rules = [f".{name}{{fill:{pair[scheme]}}}" for name, pair in COLOURS.items()]
    rules += [f".s-{name}{{stroke:{COLOURS[name][scheme]}}}" for name in STROKES]
    return "".join(rules)


class Drawing:
    """One picture.

    Args:
        width: of the picture, in pixels.
        height: the same.
        title: for those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self.parts: list[str] = []
        self.rules = ""
        """Further rules of CSS."""

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str = "plain",
        *lines: str,
        dashed: bool = False,
        radius: float = 3,
    ) -> None:
        """A rectangle with lines of text in its middle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect class="{colour} s-line" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}"{dash}/>'
        )
        top = y + height / 2 - (len(lines) - 1) * 8 + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * number, line, anchor="middle")

    def text(
        self, x: float, y: float, line: str, colour: str = "ink", *, anchor: str = "start", bold: bool = False
    ) -> None:
        """One line of text. The point is on its base line."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text class="{colour}" x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(line)}</text>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str = "ink",
        *,
        arrow: bool = True,
        dashed: bool = False,
    ) -> None:
        """A line through points, with an arrow at its end."""
        end = f' marker-end="url(#to-{colour})"' if arrow else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="s-{colour}" fill="none" points="{path}"{dash}{end}/>')

    def svg(self) -> str:
        """The file."""
        markers = "".join(
            f'<marker id="to-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path class="{name}" d="M0,0.5 L8,4 L0,7.5 z"/></marker>'
            for name in STROKES
        )
        style = (
            f"text{{font:{SIZE}px system-ui,-apple-system,'Segoe UI',sans-serif}}"
            f"rect,polyline{{stroke-width:1.2}}{_rules(0)}"
            f"@media(prefers-color-scheme:dark){{{_rules(1)}}}{self.rules}"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
                f'viewBox="0 0 {self.width} {self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style}</style>",
                f"<defs>{markers}</defs>",
                f'<rect class="paper s-line" x="1" y="1" width="{self.width - 2}" '
                f'height="{self.height - 2}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )
