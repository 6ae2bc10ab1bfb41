"""Prints the progress and the reports of both demos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from examples.demo.evidence import DemoReport, RunFacts, TensorComparison
from examples.demo.story import LOSS_TOLERANCE

if TYPE_CHECKING:
    from rich.console import Console

    from examples.demo.fault_run import FaultReport
    from examples.demo.run import DemoEvent

__all__ = ["print_event", "print_fault_report", "print_report"]


def print_event(event: DemoEvent, console: Console) -> None:
    """Print one line for an event. Of training steps, print every fourth and the last."""
    from rich.text import Text

    if event.kind == "step" and event.step is not None and event.step % 4 and event.step != event.last_step:
        return
    what = f"step {event.step}/{event.last_step}: {event.text}" if event.kind == "step" else event.text
    style = "bold red" if event.kind in ("killed", "decided") else ""
    console.print(Text.assemble((event.run, "dim"), "  ", (what, style)), soft_wrap=True)


def print_report(report: DemoReport, console: Console) -> None:
    """Print the facts as a table, then the comparisons and the verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 1, 0), header_style="bold")
    for column in ("run", "steps", "from", "tensors", "loss", "random", "seconds"):
        table.add_column(column, no_wrap=True, justify="right" if column == "seconds" else "left")
    for run in report.runs:
        cells = (
            f"[bold]{run.name}[/]\n[dim]{run.layout}[/]" + _method(run),
            f"{run.first_step}-{run.last_step}",
            _restored(run),
            _tensors(run),
            _loss(run),
            "-" if run.draws_identical is None else _mark(run.draws_identical),
            _times(run),
        )
        table.add_row(*(Text.from_markup(cell) for cell in cells))
    console.print()
    console.print(table)
    console.print()
    for line in _lines(report):
        console.print(Text.from_markup(line), soft_wrap=True)


def print_fault_report(report: FaultReport, console: Console) -> None:
    """Prints the runs, the logged verdict, and each claim with the found value."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console.print()
    for run in report.runs:
        console.print(
            Text.from_markup(
                f"[bold]{run.name}[/] on {run.node}, from {run.source}: exit code {run.code} "
                f"[dim]({run.seconds:.1f} s)[/]"
            ),
            soft_wrap=True,
        )
        if run.verdict is not None:
            console.print(Text.from_markup(f"  [bold red]{escape(run.verdict)}[/]"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for claim in report.claims:
        found = claim.found if claim.ok else f"{claim.found} (expected: {claim.expected})"
        table.add_row(Text.from_markup(_mark(claim.ok)), claim.what, Text(found))
    console.print()
    console.print(table)
    console.print()
    failed = sum(not claim.ok for claim in report.claims)
    verdict = "Every claim is true." if report.ok else f"{failed} of {len(report.claims)} claims are false."
    console.print(
        Text.from_markup(
            f"{_mark(report.ok)} [bold]{verdict}[/] {report.layout}, {report.optimizer}; fault in step "
            f"{report.fault_step} of {report.steps} ({report.seconds:.0f} s)"
            + (f"; everything is in {escape(report.folder)}" if report.folder else "")
        ),
        soft_wrap=True,
    )


def _lines(report: DemoReport) -> list[str]:
    from rich.markup import escape

    kill, stored, read = report.kill, report.stored, report.stored.read
    lines = [
        f"{report.parameters:,} parameters; {escape(report.text)} ({report.text_bytes:,} bytes); "
        + f"{report.device}; "
        + ", ".join(f"{name} {number}" for name, number in report.versions.items()),
        "from: the restored step",
        "tensors: number of tensors that are bit-identical to the saved ones; end: to the uninterrupted run",
        "loss: largest relative difference to that run (same layout: 0; other layout: up to "
        f"{LOSS_TOLERANCE:.0e}), and the last step's loss",
        "random: each rank's generators continue as in the uninterrupted run",
        "",
        f"{_mark(kill.ok)} SIGKILL in the save of step {kill.step}: {_count(kill.workers, 'worker')}; "
        f"left {_size(kill.bytes)} in {_count(kill.files, 'shard file')} and "
        + ("a manifest" if kill.committed else "no manifest: not a checkpoint"),
    ]
    for run in report.runs:
        for step, why in (run.passed_over or {}).items():
            lines.append(escape(f"  {run.name} passed over step {step}: {why}"))
    for comparison, what in _comparisons(report):
        if comparison.differing:
            lines.append(f"  {what}: differ: {', '.join(comparison.differing[:5])}")
        if not comparison.plain_identical:
            lines.append(f"  {what}: schedule or data position differ")
    lines += [
        f"{_mark(stored.verified)} verify, step {stored.step}: {stored.chunks} chunks, {_size(stored.bytes)}",
        *(escape(f"  {fault}") for fault in stored.faults),
        f"{_mark(read.ok)} read by one process without a process group: {_counts(read)} tensors, "
        f"{_size(read.bytes)}",
        f"  committed in the run folder: {', '.join(str(step) for step in report.steps_left)}"
        + (f"; all files are in {escape(report.folder)}" if report.folder else ""),
        "",
        f"{_mark(report.ok)} [bold]{_verdict(report)}[/] ({report.seconds:.0f} s)",
    ]
    return lines


def _comparisons(report: DemoReport) -> list[tuple[TensorComparison, str]]:
    found = [(run.restored, f"{run.name}, restored") for run in report.runs]
    found += [(run.end, f"{run.name}, at the end") for run in report.runs]
    found.append((report.stored.read, "the last checkpoint"))
    return [(comparison, what) for comparison, what in found if comparison is not None]


def _verdict(report: DemoReport) -> str:
    if report.ok:
        return "Every tensor was restored bit for bit on every layout, and training continued unchanged."
    failed = [run.name for run in report.runs if not run.ok]
    failed += ["the kill"] * (not report.kill.ok) + ["the last checkpoint"] * (not report.stored.ok)
    return f"Failed: {', '.join(failed)}."


def _restored(run: RunFacts) -> str:
    if run.restored_step is None:
        return "-"
    return f"{run.restored_step} {_mark(run.restored_step == run.expected_step)}"


def _method(run: RunFacts) -> str:
    return "" if run.method == "adamw" else f"\n[dim]{run.method}[/]"


def _tensors(run: RunFacts) -> str:
    lines = []
    if run.restored is not None:
        lines.append(f"{_counts(run.restored)} {_mark(run.restored.ok)}")
    if run.end is not None:
        lines.append(f"end {_counts(run.end)} {_mark(run.end.ok)}")
    return "\n".join(lines) or "-"


def _counts(found: TensorComparison) -> str:
    return f"{found.identical}/{found.compared}"


def _loss(run: RunFacts) -> str:
    if run.loss_difference is None:
        return f"{run.last_loss:.4f}"
    text = "0" if run.loss_difference == 0.0 else f"{run.loss_difference:.0e}"
    return f"{text} {_mark(run.loss_difference <= run.loss_tolerance)}\n{run.last_loss:.4f}"


def _times(run: RunFacts) -> str:
    lines = [f"{run.seconds:.1f}"]
    if run.restored_step is not None:
        lines.append(f"[dim]restore {run.restore_seconds:.2f}[/]")
    if run.saves:
        lines.append(f"[dim]save {sum(run.saves.values()) / len(run.saves):.2f}[/]")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _mark(fine: bool) -> str:
    return "[green]✓[/]" if fine else "[red]✗[/]"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
