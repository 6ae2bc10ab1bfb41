"""What the demo of a fault found: as values, and for a person."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardproof.demo.fault_claims import Claim, FaultRunFacts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FaultReport", "print_fault_report"]


@dataclass(frozen=True, slots=True)
class FaultReport:
    """All that the demo of a fault found."""

    fault: str
    layout: str
    optimizer: str
    steps: int
    save_every: int
    fault_step: int
    """Counted from 1."""
    runs: tuple[FaultRunFacts, ...]
    """Those with the fault, in their order."""
    claims: tuple[Claim, ...]
    folder: str | None
    """Where everything is; None if it was removed."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every claim held."""
        return all(claim.ok for claim in self.claims)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values, with the verdict on each claim."""
        values = asdict(self) | {"ok": self.ok}
        for claim, held in zip(values["claims"], self.claims, strict=True):
            claim["ok"] = held.ok
        return values


def print_fault_report(report: FaultReport, console: Console) -> None:
    """The runs, the verdict in the words of the log, and each claim with what was found."""
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
    verdict = "Every claim held." if report.ok else f"{failed} of {len(report.claims)} claims did not hold."
    console.print(
        Text.from_markup(
            f"{_mark(report.ok)} [bold]{verdict}[/] {report.layout}, {report.optimizer}; fault in step "
            f"{report.fault_step} of {report.steps} ({report.seconds:.0f} s)"
            + (f"; everything is in {escape(report.folder)}" if report.folder else "")
        ),
        soft_wrap=True,
    )


def _mark(fine: bool) -> str:
    return "[green]✓[/]" if fine else "[red]✗[/]"
