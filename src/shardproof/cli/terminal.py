"""What people see: tables on standard output, progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardproof.cli.words import gigabytes_per_second, printable

__all__ = ["bytes_progress", "console", "table"]

WIDTH_OFF_TERMINAL = 200


def console(stream: TextIO | None = None) -> Console:
    """A console that prints texts as they are, without markup; wide where there is no terminal."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else WIDTH_OFF_TERMINAL
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A plain table, cells shown as they are; the columns named in `right` are flush right."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        drawn.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn


@contextmanager
def bytes_progress(title: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with GB and GB/s on standard error, if `shown` and that is a terminal.

    Yields:
        To be called with bytes done and bytes in all, from any thread.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn(title), BarColumn(), _Amount(), _Speed(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Amount(ProgressColumn):
    """Done of all, in GB."""

    def render(self, task: Task) -> Text:
        """The text as of now."""
        total = f" of {task.total / 1e9:.2f}" if task.total is not None else ""
        return Text(f"{task.completed / 1e9:.2f}{total} GB")


class _Speed(ProgressColumn):
    """Mean speed since the start, in GB/s."""

    def render(self, task: Task) -> Text:
        """The text as of now."""
        seconds = time.monotonic() - task.start_time if task.start_time else 0.0
        return Text(gigabytes_per_second(task.completed, seconds) if seconds else "")
