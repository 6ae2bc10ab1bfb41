"""Pictures of a run: a save over time, the restart, and what survives."""

from __future__ import annotations

from tools.pictures.drawing import Drawing

__all__ = ["restart", "save", "tiers"]


def save() -> Drawing:
    """The time line of a save, with the fence and the commit."""
    drawing = Drawing(
        900, 380, "Time line of a save: training goes on, the writer works, the commit comes last"
    )
    for number, (lane, note) in enumerate(
        (("training", "each rank"), ("writer", "each rank"), ("coordinator", "rank 0"), ("storage", ""))
    ):
        y = 84 + number * 62
        drawing.text(20, y + 18, lane, bold=True)
        drawing.text(20, y + 35, note, "faint")
        drawing.line([(104, y + 52), (880, y + 52)], "line", arrow=False)
    for x, text in ((251, "save() returns"), (517, "all is copied"), (775, "result() returns")):
        drawing.line([(x, 52), (x, 326)], "ink", arrow=False, dashed=True)
        drawing.text(x, 44, text, anchor="middle")
    drawing.box(104, 86, 78, 40, "plain", "step 100")
    drawing.box(184, 86, 66, 40, "wait", "save()")
    drawing.box(252, 86, 200, 40, "plain", "forward and backward", "of step 101")
    drawing.box(454, 86, 62, 40, "wait", "fence")
    drawing.box(518, 86, 90, 40, "plain", "optimizer", "step 101")
    drawing.box(610, 86, 268, 40, "plain", "step 102, step 103, …")
    drawing.box(252, 148, 264, 40, "rank0", "reads live memory, hashes, writes")
    drawing.box(518, 148, 122, 40, "rank0", "writes the rest,", "flushes")
    drawing.box(184, 210, 66, 40, "rank1", "agree,", "plan")
    drawing.box(642, 210, 132, 40, "rank1", "checks every file", "and digest")
    drawing.box(252, 272, 522, 40, "bad", "shard files without a manifest: not a checkpoint", dashed=True)
    drawing.box(776, 272, 102, 40, "good", "committed")
    drawing.text(20, 44, "time →", "faint")
    drawing.text(445, 346, "a job that dies here resumes from the previous step", "faint", anchor="middle")
    drawing.text(826, 346, "from step 100", "faint", anchor="middle")
    drawing.text(
        485, 366, "The optimizer step waits only for bytes that are not copied yet.", anchor="middle"
    )
    return drawing


def restart() -> Drawing:
    """What a restart chooses, and why."""
    drawing = Drawing(
        900, 268, "A restart on fewer ranks takes the newest whole step and names those it passes over"
    )
    steps = (
        ("step-00000060", "good", "whole"),
        ("step-00000080", "good", "whole"),
        ("step-00000100", "bad", "a byte changed"),
        ("step-00000120", "bad", "no manifest:", "its save died"),
    )
    for number, (name, colour, *lines) in enumerate(steps):
        x = 30 + number * 216
        drawing.text(x, 36, name, bold=True)
        drawing.box(x, 48, 190, 50, colour, *lines, dashed=number == 3)
    drawing.line([(760, 102), (760, 132), (563, 132), (563, 106)])
    drawing.text(660, 150, "passed over", "faint", anchor="middle")
    drawing.line([(551, 102), (551, 132), (352, 132), (352, 106)])
    drawing.text(452, 150, "passed over", "faint", anchor="middle")
    drawing.line([(340, 102), (340, 176)])
    drawing.text(30, 132, "restore(state) reads the newest", "faint")
    drawing.text(30, 150, "whole step and verifies it", "faint")
    for rank in range(3):
        drawing.box(230 + rank * 76, 182, 68, 34, f"rank{rank}", f"rank {rank}")
    drawing.text(470, 204, "the same state on 3 ranks, where 4 ranks saved it")
    drawing.text(
        30,
        248,
        "shardproof doctor RUN names each fault and its remedy; shardproof prune RUN frees the space.",
    )
    return drawing


def tiers() -> Drawing:
    """Where the state is, and what survives the loss of a node."""
    drawing = Drawing(
        900, 470, "Memory, disks and a bucket, and which of them keep a step after each failure"
    )
    for number, name in enumerate("AB"):
        x = 30 + number * 300
        drawing.box(x, 20, 260, 186, "paper", dashed=True, radius=8)
        drawing.text(x + 14, 42, f"node {name}", bold=True)
        drawing.box(x + 14, 56, 232, 36, "rank0", "training memory")
        drawing.box(x + 14, 152, 108, 40, "rank1", "memory", "memory://run")
        drawing.box(x + 138, 152, 108, 40, "rank2", "local disk", "node_local=")
        drawing.line([(x + 68, 94), (x + 68, 148)])
        drawing.line([(x + 192, 94), (x + 192, 148)])
        drawing.text(x + 130, 126, "or", "faint", anchor="middle")
    drawing.line([(222, 192), (222, 222), (522, 222), (522, 196)])
    drawing.text(310, 217, "copy", "faint", anchor="middle")
    drawing.line([(594, 74), (660, 74)])
    drawing.box(664, 52, 206, 44, "rank3", "shared folder or bucket", "on its own, as first tier")
    drawing.line([(594, 172), (660, 172)], dashed=True)
    drawing.box(664, 150, 206, 44, "rank3", "second tier: folder or bucket", "copied in the background")
    columns = ((392, "all processes die"), (552, "node A is lost"), (712, "all nodes are lost"))
    for x, title in columns:
        drawing.text(x + 79, 248, title, anchor="middle", bold=True)
    rows = (
        ("memory or local disk, one copy", "kept", "lost", "lost"),
        ("the same with NodeLocal(replicas=1)", "kept", "kept", "lost"),
        ("shared folder or bucket", "kept", "kept", "kept"),
        ("second tier, after its upload", "kept", "kept", "kept"),
    )
    for number, (name, *found) in enumerate(rows):
        y = 262 + number * 46
        drawing.text(30, y + 23, name)
        for (x, _), word in zip(columns, found, strict=True):
            drawing.box(x, y, 158, 38, "good" if word == "kept" else "bad", word)
    drawing.text(30, 460, "Each row: the steps that are committed there.", "faint")
    return drawing
