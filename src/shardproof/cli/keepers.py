"""``shardproof memory``: the runs that keeper processes of this node hold in memory."""

from __future__ import annotations

import click

from shardproof.cli.failures import BAD, YES, BadPath
from shardproof.cli.options import json_option, print_json

__all__ = ["memory_command"]


@click.command("memory", short_help="List the runs that this node holds in memory, or free one.")
@click.option(
    "--drop", metavar="RUN", help="End the keeper of a run (RUN or memory://RUN), and free all that it holds."
)
@json_option
def memory_command(drop: str | None, as_json: bool) -> int:
    """List the runs that this user has in the memory of this node (`memory://RUN` of a Checkpointer).

    Exit code 1: there is no such run to drop.
    """
    from dataclasses import asdict

    from shardproof._utils.humanize import gigabytes
    from shardproof.cli.terminal import console, table
    from shardproof.errors import StorageError
    from shardproof.storage import MemoryStorage, keepers_here

    if drop is not None:
        try:
            storage = MemoryStorage(f"memory://{drop.removeprefix('memory://')}")
        except StorageError as error:
            raise BadPath(f"--drop: {error.message}") from error
        name = storage.location.removeprefix("memory://")
        if "/" in name:
            raise BadPath(
                f"--drop: {storage.location} is a part of a run: name the run, {name.split('/')[0]}"
            )
        dropped = storage.drop()
        if as_json:
            print_json({"run": name, "dropped": dropped})
        else:
            click.echo(f"{storage.location} {'was dropped' if dropped else 'has no keeper on this node'}")
        return YES if dropped else BAD
    found = {name: MemoryStorage(f"memory://{name}").usage() for name in keepers_here()}
    usages = {name: usage for name, usage in found.items() if usage is not None}
    if as_json:
        print_json([{"run": name, **asdict(usage)} for name, usage in usages.items()])
    elif not usages:
        click.echo("no run is in the memory of this node")
    else:
        titles = ("run", "used", "budget", "files", "processes", "keeper")
        rows = [
            (
                f"memory://{name}",
                gigabytes(usage.used),
                gigabytes(usage.budget),
                *map(str, (usage.files, usage.processes, usage.keeper)),
            )
            for name, usage in usages.items()
        ]
        console().print(table(titles, rows, right=titles[1:]))
    return YES
