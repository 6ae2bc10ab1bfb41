"""``shardproof verify`` and ``shardproof diff``: read and prove one checkpoint, compare two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from shardproof.commands.cli.options import (
    checkpoint_of,
    format_option,
    is_run,
    json_option,
    key_options,
    no_step,
    other_format_option,
    path_argument,
    path_or_run_argument,
    print_json,
    register_option,
    renames_of,
    step_folder,
    trust_pickle_option,
    worker_options,
)
from shardproof.commands.cli.terminal import BAD, UNEXPECTED, YES
from shardproof.errors import tells_nothing

if TYPE_CHECKING:
    from shardproof.commands.report import Difference, ValueDifference
    from shardproof.engine.foreign import Foreign
    from shardproof.engine.storage import Storage

FAULTS_SHOWN = 20


@click.command("verify", short_help="Read every byte and compare it with its digest.")
@path_or_run_argument("ckpt")
@click.argument("step", required=False)
@format_option
@json_option
def verify_command(
    ckpt: str,
    step: str | None,
    format: str | None,  # noqa: A002 the name of the option
    as_json: bool,
) -> int:
    """Compare every byte of CKPT with what was saved; prove that the chunks tile every tensor.

    CKPT is a checkpoint, or a run: then STEP of it, or its newest step that can be restored.

    For another format, the command checks what the format can prove, and reports what it cannot.

    Exit code 0: whole. 1: damaged or not committed; the output names each fault. 3: the checkpoint could not
    be read and may be whole.
    """
    from shardproof.commands.cli.terminal import bytes_progress
    from shardproof.engine.foreign import foreign_of
    from shardproof.errors import NotCommittedError
    from shardproof.runs.maintenance import verify_any

    foreign: Foreign | None = None
    try:
        if step is not None and is_run(ckpt) and step_folder(step) is None:
            raise no_step(ckpt, step)
        checkpoint, rest = checkpoint_of(ckpt, () if step is None else (step,), quiet=as_json)
        if rest:
            raise click.UsageError(f"{ckpt} is no run, so it has no step {step}: leave STEP out")
        foreign = foreign_of(checkpoint)
        with bytes_progress("verify", shown=not as_json) as on_progress:
            report = verify_any(foreign, on_progress, format=format).to_json()
    except NotCommittedError as error:  # a result of this command: print it to standard output
        report = _nothing_there(ckpt if foreign is None else foreign.location, error.to_wire())
    if as_json:
        print_json(report)
    else:
        _show_report(report)
        if foreign is not None and not report["ok"] and (note := _of_nodes(foreign.storage)) is not None:
            click.echo(note)
    return _code(report)


def _of_nodes(storage: Storage) -> str | None:
    """A note that files of a checkpoint may be on other nodes; None if its run is not on several nodes."""
    from shardproof._utils.humanize import printable
    from shardproof.engine.storage import LocalStorage
    from shardproof.errors import StorageError
    from shardproof.runs.checkpointer import read_node_mark

    if storage.path is None:
        return None
    try:
        mark = read_node_mark(LocalStorage(storage.path.parent))
    except StorageError:
        return None
    if mark is None:
        return None
    return printable(f"note: {mark.sentence}. A restore with node_local=True reads them")


def _code(report: dict[str, Any]) -> int:
    if report["ok"]:
        return YES
    return UNEXPECTED if all(tells_nothing(fault["details"]) for fault in report["faults"]) else BAD


def _nothing_there(location: str, fault: dict[str, Any]) -> dict[str, Any]:
    return {
        "location": location,
        "step": None,
        "ok": False,
        "files": 0,
        "chunks": 0,
        "bytes": 0,
        "seconds": 0.0,
        "faults": [fault],
    }


def _show_report(report: dict[str, Any]) -> None:
    from shardproof._utils.humanize import counted, gigabytes, gigabytes_per_second, printable, span

    step = "" if report["step"] is None else f", step {report['step']}"
    unproved = report.get("unproved", 0)
    nbytes = report["bytes"] + unproved
    read = (
        f"{counted(report['chunks'], 'chunk')} in {counted(report['files'], 'file')}, {gigabytes(nbytes)} "
        f"read in {span(report['seconds'])} at {gigabytes_per_second(nbytes, report['seconds'])}"
    )
    if unproved:
        most = gigabytes(report["bytes"]) if report["bytes"] else "none"
        read += f"; the format {report['format']} has checksums for {most} of it"
    if report["ok"]:
        proved = "partly proved" if report["bytes"] else "unproved"
        title = f"consistent, {proved}" if unproved else "whole"
        click.echo(printable(f"{title}: {report['location']}{step}: {read}"))
        for note in report.get("notes", ()):
            click.echo(printable(f"note: {note}"))
        return
    faults = report["faults"]
    title = "BAD" if _code(report) == BAD else "NO ANSWER"
    click.echo(printable(f"{title}: {report['location']}{step}: {counted(len(faults), 'fault')} ({read})"))
    for fault in faults[:FAULTS_SHOWN]:
        click.echo(printable(f"  {fault['type']}: {fault['message']}", lines=True))
    if len(faults) > FAULTS_SHOWN:
        click.echo(f"  and {len(faults) - FAULTS_SHOWN:,} more (--json lists all)")
    if title != "BAD":
        click.echo(
            "The checkpoint could not be read and may be whole. Fix what the faults name, then verify again."
        )


LONGEST_VALUE = 100
VALUES_SHOWN = 40
_NOUNS = {"digest": "chunk", "read": "element"}


@click.command("diff", short_help="Compare two checkpoints, to the bit.")
@path_argument("a")
@path_argument("b")
@format_option
@other_format_option
@key_options("compare")
@click.option("--measure", is_flag=True, help="Measure by how much tensors differ. Reads those that do.")
@worker_options("read")
@trust_pickle_option
@register_option
@json_option
def diff_command(
    a: str,
    b: str,
    include: Sequence[str],
    exclude: Sequence[str],
    rename: Sequence[str],
    register: Sequence[str],
    as_json: bool,
    **options: Any,
) -> int:
    """Compare the states in A and B: keys, dtypes, shapes, plain values, and every tensor to the bit.

    A and B may have different formats. --format names the format of A, as it names the format of SRC for
    convert. --other-format names the format of B. If both checkpoints have digests and cut a tensor into the
    same chunks, digests are compared; otherwise the tensor is read. Step, time, metadata and layout are not
    differences. Plain values are compared after decoding, wherever their bytes are stored.

    --include, --exclude and --rename are those of a conversion of A to B: they take the keys of A. A key of B
    is compared if they take the name that it would have in A.

    Exit code 0: the same state. 1: they differ, or one is damaged. 2: a pattern or a rename fits no key, two
    keys get one name, or no key is left to compare. 3: one of them, or a value, could not be read.
    """
    from shardproof.commands.cli.terminal import bytes_progress
    from shardproof.commands.report import diff
    from shardproof.engine.foreign import foreign_of
    from shardproof.errors import StorageError, StructureError

    one, other = foreign_of(a), foreign_of(b)
    try:
        with bytes_progress("diff", shown=not as_json) as on_progress:
            difference = diff(
                one,
                other,
                include=include or None,
                exclude=exclude or None,
                rename=renames_of(rename),
                on_progress=on_progress,
                **options,
            )
    except StructureError as error:  # an option does not fit
        raise click.UsageError(str(error)) from error
    except StorageError:
        for foreign in () if as_json else (one, other):
            if (note := _of_nodes(foreign.storage)) is not None:
                click.echo(note, err=True)
        raise
    if as_json:
        print_json(difference.to_json())
    else:
        _show_difference(difference)
    if difference.differs:
        return BAD
    return UNEXPECTED if difference.uncompared else YES


def _show_difference(difference: Difference) -> None:
    from shardproof._utils.humanize import counted, gigabytes, printable
    from shardproof.commands.cli.terminal import console, table
    from shardproof.commands.report import fold

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
    if any(value.measured for value in difference.values):
        _show_measures(difference.values)
    elif difference.values:
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
    for value in difference.uncompared[:VALUES_SHOWN]:
        out.print(printable(f"not compared: {value.key}: {value.reason}"))
    if len(difference.uncompared) > VALUES_SHOWN:
        out.print(f"and {len(difference.uncompared) - VALUES_SHOWN:,} more (--json lists all)")
    rest = ", apart from what could not be compared" if difference.uncompared else ""
    out.print("the states differ" if difference.differs else f"the same state{rest}")


def _show_measures(values: Sequence[ValueDifference]) -> None:
    """The tensors that differ, as `most_changed_first` orders them."""
    from shardproof.commands.cli.terminal import console, table
    from shardproof.commands.report import most_changed_first

    ordered = most_changed_first(values)
    measured = [(value, value.measured) for value in ordered if value.measured is not None]
    rows = [
        (
            value.key,
            f"{value.different:,} of {value.total:,}",
            f"{found.relative:.3g}",
            f"{found.largest:.3g}",
            f"{found.one_finite:,}" if found.one_finite else "",
            *(f"{a:,}, {b:,}" if a or b else "" for a, b in (found.nan, found.inf)),
        )
        for value, found in measured[:VALUES_SHOWN]
    ]
    titles = ("tensor", "elements", "relative", "largest", "finite in one", "NaN in A, B", "Inf in A, B")
    out = console()
    out.print(table(titles, rows, right=titles[1:]), end="\n\n")
    if len(measured) > VALUES_SHOWN:
        out.print(f"and {len(measured) - VALUES_SHOWN:,} more (--json lists all)\n")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
