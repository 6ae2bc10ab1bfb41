"""The display of phases as lines and as bars."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from shardproof import events
from shardproof.engine.events.display import Bars, Lines
from tests.unit.engine.events.hubs import Bench


def lines_of(bench: Bench, every: float = 5.0) -> list[str]:
    written: list[str] = []
    bench.hub.subscribe(Lines(written.append, every))
    return written


def test_each_phase_has_a_line_with_amount_time_and_speed() -> None:
    bench = Bench()
    written = lines_of(bench)
    with bench.hub.phase("save runs/a", "collect"):
        bench.clock.now += 0.004
    with bench.hub.phase("save runs/a", "write") as phase:
        bench.clock.now += 2
        phase.progress(3 * 10**9, 3 * 10**9)
    with bench.hub.phase("save runs/a", "commit") as phase:
        phase.note(slowest_rank=3, slowest_seconds=1.5)
        bench.clock.now += 0.5
    assert written == [
        "save runs/a: collect in 4.0 ms",
        "save runs/a: write 3.00 GB in 2.00 s, 1.50 GB/s",
        "save runs/a: commit in 0.50 s, slowest rank 3: 1.50 s",
    ]


def test_a_long_phase_has_a_line_every_few_seconds() -> None:
    bench = Bench()
    written = lines_of(bench, every=5.0)
    with bench.hub.phase("save runs/a", "write") as phase:
        for second in range(1, 13):
            bench.clock.now += 1
            phase.progress(second * 10**9, 20 * 10**9)
    assert written == [
        "save runs/a: write 5.00 GB of 20.0 GB, 1.00 GB/s, ETA 15.0 s",
        "save runs/a: write 10.0 GB of 20.0 GB, 1.00 GB/s, ETA 10.0 s",
        "save runs/a: write 12.0 GB in 12.0 s, 1.00 GB/s",
    ]


def test_other_ranks_show_nothing() -> None:
    bench = Bench()
    written = lines_of(bench, every=0.0)
    with bench.hub.phase("save runs/a", "write", rank=1, world_size=2) as phase:
        bench.clock.now += 60
        phase.progress(1, 2)
    assert written == []


def test_while_rank_0_waits_the_slowest_rank_is_shown_with_its_speed() -> None:
    bench = Bench()
    written = lines_of(bench, every=5.0)
    gb = 10**9
    with bench.hub.phase("save a", "commit", world_size=8):
        bench.hub.publish_waiting("save a", "commit", 8, lambda: {2: (3 * gb, 4 * gb), 5: (1 * gb, 4 * gb)})
        bench.clock.now += 1
        bench.hub.publish_waiting("save a", "commit", 8, lambda: {5: (2 * gb, 4 * gb)})  # too soon for a line
        bench.clock.now += 4
        bench.hub.publish_waiting("save a", "commit", 8, lambda: {5: (3 * gb, 4 * gb)})
    assert written[:2] == [
        "save a: commit waits for 2 of 8 ranks, slowest rank 5: 1.00 GB of 4.00 GB",
        "save a: commit waits for 1 of 8 ranks, slowest rank 5: 3.00 GB of 4.00 GB, ETA 2.50 s",
    ]


def test_a_failure_is_shown_without_control_characters() -> None:
    bench = Bench()
    written = lines_of(bench)

    def write() -> None:
        with bench.hub.phase("save runs/\x1b[2Ja", "write"):
            bench.clock.now += 1
            raise OSError("disk full \x1b[31m")

    with pytest.raises(OSError, match="full"):
        write()
    assert written == ["save runs/\\x1b[2Ja: write FAILED after 1.00 s: OSError: disk full \\x1b[31m"]


def test_show_writes_to_a_file_that_is_no_terminal_and_ends() -> None:
    file = io.StringIO()
    with events.show(file), events.phase("save a", "agree"):
        pass
    with events.phase("save a", "write"):
        pass
    assert re.fullmatch(r"save a: agree in \S+ ms\n", file.getvalue())


def drawn(bench: Bench, *, lines: bool = True) -> tuple[io.StringIO, Bars]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, markup=False, highlight=False)
    bars = Bars(console, lines=lines)
    bench.hub.subscribe(bars)
    return file, bars


@pytest.fixture
def displays(monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """The displays of rich that the test starts."""
    started: list[Progress] = []
    start = Progress.start

    def note(display: Progress) -> None:
        started.append(display)
        start(display)

    monkeypatch.setattr(Progress, "start", note)
    return started


def test_bars_show_phases_under_way_and_leave_a_line_each(displays: list[Progress]) -> None:
    bench = Bench()
    file, _ = drawn(bench)
    with bench.hub.phase("save a", "write", world_size=2) as phase:
        assert displays == [], "nothing runs until there is something to draw"
        bench.clock.now += 2
        phase.progress(1 * 10**9, 4 * 10**9)
        (display,) = displays
        (task,) = display.tasks
        assert (task.description, task.completed, task.total) == ("save a: write", 1e9, 4e9)
        assert task.fields["text"] == "1.00 GB of 4.00 GB, 500 MB/s, ETA 6.00 s"
        bench.hub.publish_waiting("save a", "write", 2, lambda: {1: (10**9, 2 * 10**9)})
        assert [one.fields["text"] for one in display.tasks][1] == (
            "waits for 1 of 2 ranks, slowest rank 1: 1.00 GB of 2.00 GB"
        )
        display.refresh()
    assert displays == [display] and display.tasks == [] and not display.live.is_started
    text = file.getvalue()
    assert "ETA 6.00 s" in text
    assert "save a: write 1.00 GB in 2.00 s, 500 MB/s\n" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_bars_without_lines_and_two_phases_at_once(displays: list[Progress]) -> None:
    bench = Bench()
    file, bars = drawn(bench, lines=False)
    with bench.hub.phase("verify", "read") as one, bench.hub.phase("verify", "tile") as two:
        bench.clock.now += 1
        one.progress(1, 2)
        two.progress(1, 0)
        (display,) = displays
        assert len(display.tasks) == 2
        bars.close()
        assert display.tasks == [] and not display.live.is_started
    assert "verify: read 1 B in" not in file.getvalue()


def test_on_a_real_terminal_bars_are_drawn_and_removed() -> None:
    script = (
        "import sys\n"
        "from shardproof.commands.cli.terminal import bytes_progress\n"
        "import time\n"
        "with bytes_progress('verify', shown=True) as on_progress:\n"
        "    end = time.monotonic() + 0.3\n"
        "    while time.monotonic() < end:\n"
        "        on_progress(500_000_000, 2_000_000_000)\n"
        "print('done', file=sys.stderr)\n"
    )
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stderr=theirs,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 65536):
                text += chunk
        except OSError:  # the other side is closed
            pass
        assert process.wait(60) == 0
    finally:
        os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.decode())
    assert "verify: read" in plain
    assert re.search(r"500 MB of 2\.00 GB, [0-9.]+ [kMG]B/s, ETA [0-9.]+ ", plain)
    assert plain.rstrip().endswith("done")
    assert text.count(b"\x1b[?25l") == text.count(b"\x1b[?25h")
