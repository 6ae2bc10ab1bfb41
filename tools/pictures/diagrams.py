"""Pictures of two protocols: the states of the rerun machine, and one step of the hybrid optimizer."""

from __future__ import annotations

from tools.pictures.drawing import Drawing

__all__ = ["hybrid_step", "rerun"]


def rerun() -> Drawing:
    """The states of the rerun machine."""
    drawing = Drawing(900, 430, "States of the rerun machine, from a rejected result to its verdict")
    drawing.box(30, 30, 180, 44, "plain", "not running")
    drawing.box(340, 30, 180, 44, "rank0", "initial run")
    drawing.box(680, 30, 190, 44, "rank0", "rerunning in place")
    drawing.box(680, 160, 190, 44, "rank1", "will rerun", "from checkpoint")
    drawing.box(340, 290, 210, 44, "rank0", "rerunning", "from checkpoint")
    drawing.box(660, 290, 210, 44, "rank0", "rerunning again", "from checkpoint")
    drawing.line([(210, 44), (336, 44)])
    drawing.text(273, 38, "a step begins", "faint", anchor="middle")
    drawing.line([(340, 62), (214, 62)])
    drawing.text(277, 78, "nothing rejected", "faint", anchor="middle")
    drawing.line([(520, 52), (676, 52)])
    drawing.text(598, 44, "rejected, so rerun", "faint", anchor="middle")
    drawing.line([(700, 74), (700, 112), (150, 112), (150, 78)])
    drawing.text(430, 106, "not the same: TRANSIENT FAULT", anchor="middle")
    drawing.line([(800, 74), (800, 156)])
    drawing.text(792, 132, "the same: suspect,", "faint", anchor="end")
    drawing.text(792, 148, "exit code 16", "faint", anchor="end")
    drawing.line([(680, 190), (445, 190), (445, 286)])
    drawing.text(438, 224, "restarted on", "faint", anchor="end")
    drawing.text(438, 240, "another device", "faint", anchor="end")
    drawing.line([(730, 204), (730, 286)])
    drawing.text(722, 236, "restarted on", "faint", anchor="end")
    drawing.text(722, 252, "the same device", "faint", anchor="end")
    drawing.line([(820, 290), (820, 208)])
    drawing.text(828, 236, "the same", "faint")
    drawing.text(828, 252, "there: 16", "faint")
    drawing.line([(340, 300), (120, 300), (120, 78)])
    drawing.text(134, 292, "the same: CORRECT RESULT")
    drawing.line([(340, 324), (80, 324), (80, 78)])
    drawing.text(94, 354, "not the same: PERSISTENT FAULT of the first device")
    drawing.line([(765, 334), (765, 376), (45, 376), (45, 78)])
    drawing.text(660, 394, "not the same: TRANSIENT FAULT", anchor="middle")
    drawing.text(
        30, 416, "Words in capitals are verdicts. The program exits with code 16 to be restarted.", "faint"
    )
    return drawing


def hybrid_step() -> Drawing:
    """One step of the hybrid optimizer, over time."""
    lanes = {"main": 120, "down": 330, "host": 550, "up": 790}
    drawing = Drawing(
        900, 500, "One step of the hybrid optimizer: main stream, copy streams and host over time"
    )
    for name, title in (
        ("main", "main stream"),
        ("down", "down stream"),
        ("host", "host"),
        ("up", "up stream"),
    ):
        drawing.box(lanes[name] - 70, 16, 140, 30, "plain", title)
        drawing.line([(lanes[name], 46), (lanes[name], 484)], "line", arrow=False, dashed=True)

    def work(lane: str, y: float, *lines: str, width: float = 204) -> None:
        height = 10 + 17 * len(lines)
        colours = {"main": "rank0", "down": "rank1", "host": "rank2", "up": "rank3"}
        drawing.box(lanes[lane] - width / 2, y, width, height, colours[lane], *lines)

    def message(start: str, end: str, y: float, text: str) -> None:
        drawing.line([(lanes[start], y), (lanes[end] - (4 if lanes[end] > lanes[start] else -4), y)])
        drawing.text((lanes[start] + lanes[end]) / 2, y - 6, text, anchor="middle")

    work("main", 58, "backward writes gradients")
    drawing.text(lanes["host"], 76, "step() is called", "faint", anchor="middle")
    work("main", 98, "redistributes gradients", "and records the mark")
    message("main", "down", 164, "down waits for the mark")
    message("down", "host", 194, "gradients 1, event 1")
    message("down", "host", 226, "gradients 2, event 2")
    work("main", 204, "the device's step of", "its own parameters")
    work("host", 244, "waits for event 1,", "steps bucket 1")
    message("host", "up", 312, "bucket 1, after the mark")
    work("host", 330, "waits for event 2,", "steps bucket 2")
    message("host", "up", 398, "bucket 2")
    message("up", "main", 436, "main waits for up")
    drawing.text(lanes["host"], 470, "step() returns; forward reads both buckets", "faint", anchor="middle")
    return drawing
