"""Tables on standard output and progress bars on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardproof._utils.humanize import printable
from shardproof.engine.events import Bars, Hub

WIDTH_OFF_TERMINAL = 200


def console(stream: TextIO | None = None) -> Console:
    """A console without markup. Its lines are wide if the output is not a terminal."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else WIDTH_OFF_TERMINAL
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A plain table. The columns named in `right` are flush right."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        drawn.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn


@contextmanager
def bytes_progress(title: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with GB and GB/s on standard error, if `shown` is true and that is a terminal.

    Yields:
        A function to call with the bytes done and the total, from any thread.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    hub = Hub()  # a separate hub, so that the bar shows only this command
    bars = Bars(console(sys.stderr), lines=False, at_once=True)
    with hub.subscribe(bars, bars.close), hub.phase(title, "read") as phase:
        yield phase.progress
