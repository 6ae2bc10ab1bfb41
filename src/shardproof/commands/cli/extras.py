"""``shardproof trace``: merges the traces of all ranks."""

from __future__ import annotations

from pathlib import Path

import click

from shardproof.commands.cli.failures import YES
from shardproof.commands.cli.options import folder_argument, json_option, print_json


@click.command("trace", short_help="Merge the traces of all ranks, for Perfetto.")
@folder_argument("folder")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), required=True, help="The new file, such as all.json."
)
@json_option
def trace_command(folder: str, output: str, as_json: bool) -> int:
    """Merge the trace files that `sp.events.trace` wrote to FOLDER into one time line.

    Open the new file at https://ui.perfetto.dev. Exit code 1: there is no trace in FOLDER.
    """
    from dataclasses import asdict

    from shardproof._utils.humanize import counted, printable, span
    from shardproof.engine.events import merge_traces

    merged = merge_traces(sorted(Path(folder).glob("*.json")), output)
    if as_json:
        print_json(asdict(merged))
        return YES
    click.echo(
        printable(
            f"{merged.path}: {counted(merged.phases, 'phase')} of {counted(merged.ranks, 'rank')}, from "
            f"{counted(merged.files, 'file')}; ranks leave their meetings within {span(merged.spread)}"
        )
    )
    if merged.unfinished:
        click.echo(f"{counted(merged.unfinished, 'phase')} never ended: marked unfinished")
    for name in merged.skipped:
        click.echo(printable(f"skipped, not the trace of a rank: {name}"), err=True)
    return YES
