"""``shardproof ls``: the checkpoints of a run."""

from __future__ import annotations

import click

from shardproof.cli.failures import YES
from shardproof.cli.options import folder_argument, json_option, print_json

__all__ = ["command"]


@click.command("ls", short_help="List the checkpoints of a run.")
@folder_argument("run")
@json_option
def command(run: str, as_json: bool) -> int:
    """List the checkpoints of RUN.

    Steps that are not committed are listed with the reason: the save died, or is still in progress
    (a leftover, see prune), or the checkpoint is damaged (see verify and repair). A suspect is the checkpoint
    of a step whose validation failed; once that is settled, its verdict is shown.
    """
    from shardproof.report import scan_run
    from shardproof.storage import LocalStorage

    storage = LocalStorage(run)
    infos = scan_run(storage)
    if as_json:
        print_json({"location": storage.location, "checkpoints": [info.to_json() for info in infos]})
        return YES

    import time

    from shardproof.cli.terminal import console, table
    from shardproof.cli.words import age, counted, gigabytes

    out = console()
    if not infos:
        out.print(f"no checkpoints in {storage.location}")
        return YES
    now = time.time()
    rows = [
        (
            "-" if info.step is None else str(info.step),
            info.name,
            "-" if info.time is None else age(now - info.time),
            gigabytes(info.bytes),
            str(info.tensors) if info.whole else "-",
            "-" if info.world_size is None else str(info.world_size),
            info.status + (", repaired" if info.repaired else ""),
            info.reason
            or (f"{counted(info.unnamed, 'file')} of dead saves beside it" if info.unnamed else "")
            or ("a symbolic link" if info.linked else ""),
        )
        for info in infos
    ]
    headings = ("step", "folder", "age", "size", "tensors", "ranks", "status", "")
    out.print(table(headings, rows, right=("step", "age", "size", "tensors", "ranks")))
    return YES
