"""Pictures of one tensor: six layouts as boxes, and a save by four ranks that three ranks load."""

from __future__ import annotations

from collections.abc import Callable

from tools.pictures.drawing import Drawing

__all__ = ["layouts", "reshard"]

ROWS, COLUMNS = 6, 8
"""Shape of the tensor."""


def _grid(
    drawing: Drawing,
    x: float,
    y: float,
    cell: float,
    owner: Callable[[int, int], int],
    *,
    colour: str = "rank",
) -> None:
    """The elements of the tensor, each in the colour of its rank."""
    for row in range(ROWS):
        for column in range(COLUMNS):
            drawing.box(
                x + column * cell, y + row * cell, cell, cell, f"{colour}{owner(row, column)}", radius=0
            )


def _flat(row: int, column: int) -> int:
    """The rank of an element whose flat buffer is cut at the elements 5, 21 and 37."""
    return sum(row * COLUMNS + column >= cut for cut in (5, 21, 37))


PANELS: tuple[tuple[str, Callable[[int, int], int], tuple[str, str]], ...] = (
    ("replicated", lambda row, column: 0, ("every rank has the whole box;", "one of them writes it")),
    (
        "FSDP2",
        lambda row, column: row // 2,
        ("one box a rank; rank 3 has none", "and still declares the shape"),
    ),
    ("tensor parallel", lambda row, column: column // 2, ("one box a rank,", "of two columns")),
    (
        "FSDP2 over tensor parallel",
        lambda row, column: row // 3 * 2 + column // 4,
        ("one box a rank, cut in", "rows and in columns"),
    ),
    ("ZeRO, FSDP1", _flat, ("a flat range of a buffer:", "up to three boxes a rank")),
    (
        "fused gate and up",
        lambda row, column: row % 3,
        ("one box a rank of the gate,", "and one of the up rows"),
    ),
)
"""Title, rank of each element, and what the reader sees."""


def layouts() -> Drawing:
    """Six layouts of one tensor."""
    drawing = Drawing(900, 520, "A tensor of 6 rows and 8 columns in six layouts, each as boxes of ranks")
    for number, (title, owner, caption) in enumerate(PANELS):
        x, y = 40 + number % 3 * 290, 36 + number // 3 * 226
        drawing.text(x, y, title, bold=True)
        _grid(drawing, x, y + 14, 22, owner)
        for line, text in enumerate(caption):
            drawing.text(x, y + 166 + 17 * line, text, "faint")
    for rank in range(4):
        drawing.box(40 + rank * 100, 484, 16, 16, f"rank{rank}")
        drawing.text(62 + rank * 100, 497, f"rank {rank}")
    drawing.text(450, 497, "A piece is a view of local memory and its box in the whole tensor.")
    return drawing


def reshard() -> Drawing:
    """Four ranks save, three ranks load."""
    drawing = Drawing(900, 300, "Four ranks write one file each, the manifest comes last, three ranks load")
    drawing.text(30, 32, "4 ranks save", bold=True)
    drawing.text(30, 52, "FSDP2 over tensor parallel", "faint")
    _grid(drawing, 30, 84, 24, lambda row, column: row // 3 * 2 + column // 4)
    drawing.text(30, 254, "each rank describes its own boxes;", "faint")
    drawing.text(30, 272, "the tiling is proved before a write", "faint")

    drawing.text(352, 32, "step-00001000", bold=True)
    drawing.text(352, 52, "one writer a file, a digest a chunk", "faint")
    for rank in range(4):
        y = 70 + rank * 36
        drawing.box(352, y, 206, 28, f"rank{rank}", f"shards/0000{rank}-….safetensors")
        drawing.line([(232, 108 + rank // 2 * 92), (290, 108 + rank // 2 * 92), (320, y + 14), (348, y + 14)])
    drawing.box(352, 218, 206, 28, "plain", "manifest.json")
    drawing.text(352, 272, "written last: it is the commit", "faint")

    drawing.text(678, 32, "3 ranks load", bold=True)
    drawing.text(678, 52, "FSDP2", "faint")
    _grid(drawing, 678, 84, 24, lambda row, column: row // 2)
    for rank, files in enumerate(((0, 1), (0, 1, 2, 3), (2, 3))):
        for file in files:
            drawing.line([(560, 84 + file * 36), (674, 108 + rank * 48)], "line")
    drawing.text(678, 254, "each rank reads what it needs,", "faint")
    drawing.text(678, 272, "and verifies every byte of it", "faint")
    return drawing
