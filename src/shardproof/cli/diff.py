"""``shardproof diff``: how two checkpoints differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardproof.cli.failures import BAD, YES
from shardproof.cli.options import checkpoint_argument, json_option, print_json

if TYPE_CHECKING:
    from shardproof.report import Difference

__all__ = ["command"]

LONGEST_VALUE = 100
VALUES_SHOWN = 40
_NOUNS = {"digest": "chunk", "read": "element"}


@click.command("diff", short_help="Compare two checkpoints, to the bit.")
@checkpoint_argument("a")
@checkpoint_argument("b")
@json_option
def command(a: str, b: str, as_json: bool) -> int:
    """Compare the states in A and B: keys, dtypes, shapes, plain values, and every tensor to the bit.

    Tensors are compared by digest where both are cut into the same chunks, and read where the layouts
    differ. Step, time, metadata and layout are not differences. Exit code 0: the same state. 1: they differ.
    """
    from shardproof.cli.terminal import bytes_progress
    from shardproof.report import diff
    from shardproof.storage import LocalStorage

    with bytes_progress("diff", shown=not as_json) as on_progress:
        difference = diff(LocalStorage(a), LocalStorage(b), on_progress=on_progress)
    if as_json:
        print_json(difference.to_json())
    else:
        _show(difference)
    return YES if difference.same else BAD


def _show(difference: Difference) -> None:
    from shardproof.cli.terminal import console, table
    from shardproof.cli.words import counted, gigabytes
    from shardproof.report import fold

    out = console()
    for title, keys in (("only in A", difference.only_a), ("only in B", difference.only_b)):
        if keys:
            rows = [(row.pattern, f"{row.count:,}") for row in fold((key, None) for key in keys)]
            out.print(table((title, "count"), rows, right=("count",)), end="\n\n")
    for title, changes in (("structure", difference.changed), ("plain value", difference.objects)):
        if changes:
            folded = fold((change.key, (_short(change.a), _short(change.b))) for change in changes)
            rows_of_changes = [(row.pattern, f"{row.count:,}", *row.label) for row in folded]
            out.print(table((title, "count", "A", "B"), rows_of_changes, right=("count",)), end="\n\n")
    if difference.values:
        rows_of_values = [
            (
                row.pattern,
                f"{row.count:,}",
                f"{row.label[1]:,} of {counted(row.label[2], _NOUNS[row.label[0]])}",
            )
            for row in fold(
                (value.key, (value.how, value.different, value.total)) for value in difference.values
            )
        ]
        shown = rows_of_values[:VALUES_SHOWN]
        out.print(table(("tensor", "count", "each differs in"), shown, right=("count",)), end="\n\n")
        if len(rows_of_values) > VALUES_SHOWN:
            out.print(f"and {len(rows_of_values) - VALUES_SHOWN:,} more rows (--json lists all)\n")
    out.print(
        f"tensors: {difference.same_tensors:,} equal to the bit, {len(difference.values):,} different "
        f"({difference.by_digest:,} compared by digest, {difference.by_reading:,} read: "
        f"{gigabytes(difference.bytes_read)})"
    )
    out.print("the same state" if difference.same else "the states differ")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
