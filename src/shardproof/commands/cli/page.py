"""``shardproof page``: a run, a checkpoint, or the difference of two, as one HTML file to look at."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shardproof.commands.cli.health import examined_run, nodes_option, second_tier_option, unnamed_option
from shardproof.commands.cli.options import (
    checkpoint_of,
    existing_checkpoint,
    existing_folder,
    format_option,
    is_run,
    no_step,
    other_format_option,
    path_or_run_argument,
    positive_span,
    register_option,
    step_folder,
    trust_pickle_option,
)
from shardproof.commands.cli.terminal import YES, BadPath, bytes_progress

_FITS = {
    **dict.fromkeys(("mtbf", "trace", "second_tier", "nodes", "older_than"), ("a run",)),
    "verify": ("a checkpoint",),
    "other_format": ("two checkpoints",),
    **dict.fromkeys(("format", "trust_pickle", "register"), ("a checkpoint", "two checkpoints")),
}
"""The pages that an option is for."""


@click.command("page", short_help="Make a web page of a run, a checkpoint, or two: one file to look at.")
@path_or_run_argument("path")
@click.argument("other", required=False, metavar="[STEP|OTHER]")
@click.option("-o", "--output", metavar="FILE", help="The file, such as page.html; '-' for standard output.")
@click.option("--verify", is_flag=True, help="Read every byte of the checkpoint, and show what is proved.")
@click.option(
    "--mtbf", callback=positive_span, metavar="SPAN", help="Time between failures of the job, as for ls."
)
@click.option(
    "--trace",
    metavar="FOLDER",
    callback=existing_folder,
    help="The traces of the run's saves (`sp.events.trace`): they tell how long training waited.",
)
@second_tier_option
@nodes_option
@unnamed_option
@format_option
@other_format_option
@trust_pickle_option
@register_option
@click.option(
    "--json", "as_json", is_flag=True, help="Write the facts of the page as JSON: to FILE, or print it."
)
@click.pass_context
def page_command(
    context: click.Context, /, path: str, other: str | None, output: str | None, as_json: bool, **options: Any
) -> int:
    """Write a web page about PATH: one file, which needs no network and can be mailed.

    PATH is a run, a checkpoint of any known format, or one of two checkpoints.

    The page of a run shows its steps on a time line, the step that a restore takes, space, interval, and the
    faults that doctor finds.

    The page of a checkpoint, or of STEP of a run, shows a map and a table of its tensors, and the boxes that
    each rank wrote.

    The page of two checkpoints, PATH and OTHER, shows by how much their tensors differ, and where.

    FILE may be an older page, which is replaced. Exit code 0: the file is written, whatever it shows. 1: PATH
    or OTHER is no checkpoint that can be read.
    """
    if output is None and not as_json:
        raise click.UsageError("name the file to write: -o page.html")
    target = "-" if output is None else output
    is_step = other is not None and step_folder(other) is not None and is_run(path)
    if (
        other is not None
        and not is_step
        and "://" not in other
        and not os.path.exists(other)
        and is_run(path)
    ):
        raise no_step(path, other)
    kind = "a checkpoint" if other is None or is_step else "two checkpoints"
    kind = "a run" if other is None and is_run(path) else kind
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is not ParameterSource.DEFAULT
        fits = _FITS.get(str(parameter.name), (kind,))
        if given and kind not in fits:
            names = f"{'/'.join(parameter.opts)} is for the page of {' or '.join(fits)}"
            raise click.UsageError(f"{names}, and this is the page of {kind}")
    _check_target(target, as_json)
    if kind == "a run":
        facts = _of_run(path, **options)
    elif kind == "a checkpoint":
        facts = _of_checkpoint(path, other, quiet=as_json, **options)
    else:
        parameters = {parameter.name: parameter for parameter in context.command.params}
        for name, place in (("path", path), ("other", other or "")):
            existing_checkpoint(context, parameters[name], place)
        facts = _of_two(path, other or "", quiet=as_json, **options)
    _write(facts, target, as_json)
    return YES


def _of_run(
    run: str,
    *,
    mtbf: float | None,
    trace: str | None,
    second_tier: str | None,
    nodes: tuple[str, ...],
    older_than: float,
    **_others: Any,
) -> dict[str, Any]:
    from shardproof.commands.report import run_facts
    from shardproof.engine.events import blocked_seconds

    tiers, examination = examined_run(run, second_tier, nodes, older_than)
    blocked = {} if trace is None else blocked_seconds(Path(trace).glob("*.json"))
    return run_facts(tiers, examination, mtbf=mtbf, blocked=blocked)


def _of_checkpoint(
    path: str,
    step: str | None,
    *,
    quiet: bool,
    verify: bool,
    format: str | None,  # noqa: A002 the name of the option
    trust_pickle: bool,
    **_others: Any,
) -> dict[str, Any]:
    from shardproof.commands.report import checkpoint_facts, describe
    from shardproof.engine.foreign import foreign_of

    place = foreign_of(checkpoint_of(path, () if step is None else (step,), quiet=quiet)[0])
    stored = describe(place, format=format, trust_pickle=trust_pickle)
    if not verify:
        return checkpoint_facts(stored)
    from shardproof.runs.maintenance import verify_any

    with bytes_progress("verify", shown=not quiet) as on_progress:
        return checkpoint_facts(stored, verify_any(place, on_progress, format=format).to_json())


def _of_two(
    path: str,
    other: str,
    *,
    quiet: bool,
    format: str | None,  # noqa: A002 the name of the option
    other_format: str | None,
    trust_pickle: bool,
    **_others: Any,
) -> dict[str, Any]:
    from shardproof.commands.report import diff, difference_facts
    from shardproof.engine.foreign import foreign_of

    places = foreign_of(path), foreign_of(other)
    with bytes_progress("diff", shown=not quiet) as on_progress:
        difference = diff(
            *places,
            format=format,
            other_format=other_format,
            trust_pickle=trust_pickle,
            measure=True,
            on_progress=on_progress,
        )
    with bytes_progress("histograms", shown=not quiet) as on_progress:
        return difference_facts(list(zip(places, difference.sides, strict=True)), difference, on_progress)


def _check_target(target: str, as_json: bool) -> None:
    """Refuses a file that is no older page, so that no mistake overwrites a checkpoint."""
    from shardproof.commands.report import HTML_START, JSON_START

    if target == "-":
        return
    path, start = Path(target), JSON_START if as_json else HTML_START
    if not path.parent.is_dir():
        raise BadPath(f"--output: {path.parent} is no folder: make it first")
    if path.is_dir():
        raise BadPath(f"--output: {target} is a folder: name a file in it")
    if path.exists():
        with open(path, "rb") as file:
            if file.read(len(start)) not in (b"", start):
                raise BadPath(
                    f"--output: {target} exists and is no older page: choose another name, or remove it"
                )


def _write(facts: dict[str, Any], target: str, as_json: bool) -> None:
    from shardproof._utils.humanize import gigabytes, printable
    from shardproof.commands.report import html_of, json_of
    from shardproof.engine.storage import LocalStorage

    data = json_of(facts) if as_json else html_of(facts)
    if target == "-":
        sys.stdout.buffer.write(data)
        return
    folder, name = os.path.split(os.path.abspath(target))
    LocalStorage(folder).publish(name, data, replace=True)
    click.echo(printable(f"{target}: {gigabytes(len(data))}"), err=True)
