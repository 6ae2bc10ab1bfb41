"""``shardproof verify``: read every byte of a checkpoint and prove it whole."""

from __future__ import annotations

from typing import Any

import click

from shardproof.cli.failures import BAD, UNEXPECTED, YES, tells_nothing
from shardproof.cli.options import checkpoint_argument, json_option, print_json

__all__ = ["command"]

FAULTS_SHOWN = 20


@click.command("verify", short_help="Read every byte and prove a checkpoint whole.")
@checkpoint_argument("ckpt")
@json_option
def command(ckpt: str, as_json: bool) -> int:
    """Read every byte of CKPT and compare it with what was saved; prove that the chunks tile every tensor.

    Exit code 0: it is whole. 1: it is not, or not committed; each fault is named. 3: it could not be read,
    and may be whole.
    """
    from shardproof.cli.terminal import bytes_progress
    from shardproof.errors import NotCommittedError
    from shardproof.storage import UncachedStorage

    storage = UncachedStorage(ckpt)
    with bytes_progress("verify", shown=not as_json) as on_progress:
        from shardproof.maintenance import verify

        try:
            report: dict[str, Any] = verify(storage, on_progress).to_json()
        except NotCommittedError as error:  # an answer too, and here the answer is the output
            report = _nothing_there(storage.location, error.to_wire())
    if as_json:
        print_json(report)
    else:
        _show(report)
    return _code(report)


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


def _show(report: dict[str, Any]) -> None:
    from shardproof.cli.words import counted, gigabytes, gigabytes_per_second, printable

    step = "" if report["step"] is None else f", step {report['step']}"
    read = (
        f"{counted(report['chunks'], 'chunk')} in {counted(report['files'], 'file')}, "
        f"{gigabytes(report['bytes'])} read in "
        f"{report['seconds']:.1f} s at {gigabytes_per_second(report['bytes'], report['seconds'])}"
    )
    if report["ok"]:
        click.echo(printable(f"whole: {report['location']}{step}: {read}"))
        return
    faults = report["faults"]
    title = "BAD" if _code(report) == BAD else "NO ANSWER"
    click.echo(printable(f"{title}: {report['location']}{step}: {counted(len(faults), 'fault')} ({read})"))
    for fault in faults[:FAULTS_SHOWN]:
        click.echo(printable(f"  {fault['type']}: {fault['message']}"))
    if len(faults) > FAULTS_SHOWN:
        click.echo(f"  and {len(faults) - FAULTS_SHOWN:,} more (--json lists all)")
    if title != "BAD":
        click.echo("It could not be read, which says nothing about the checkpoint: it may be whole.")
