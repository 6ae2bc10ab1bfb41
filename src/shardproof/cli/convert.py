"""``shardproof convert``: copy a checkpoint in another form."""

from __future__ import annotations

import click

from shardproof.cli.failures import YES
from shardproof.cli.options import checkpoint_argument, json_option, print_json

__all__ = ["command"]


@click.command("convert", short_help="Copy a step so that it needs no other.")
@checkpoint_argument("src")
@click.argument("dst", type=click.Path())
@click.option("--standalone", is_flag=True, help="Make the copy refer to no other step.")
@json_option
def command(src: str, dst: str, standalone: bool, as_json: bool) -> int:
    """Copy the checkpoint SRC to the folder DST, every chunk verified on its way.

    With --standalone a step that was saved incrementally becomes whole: the copy has all its bytes, and can
    be moved anywhere. It loads as SRC does: the same tensors, plain values, step, time, metadata and world
    size. Exit code 0: copied. 1: SRC is damaged or not committed, or DST holds a checkpoint; nothing is left
    in DST.
    """
    if not standalone:
        raise click.UsageError("say what to make of it: --standalone, a copy that refers to no other step")

    import time

    from shardproof.cli.terminal import bytes_progress
    from shardproof.maintenance import make_standalone
    from shardproof.storage import LocalStorage

    source, target = LocalStorage(src), LocalStorage(dst)
    begun = time.monotonic()
    with bytes_progress("copy", shown=not as_json) as on_progress:
        manifest = make_standalone(source, target, on_progress=on_progress)
    seconds = time.monotonic() - begun
    size = sum(record.size for record in manifest.files)
    if as_json:
        print_json(
            {
                "source": source.location,
                "location": target.location,
                "step": manifest.step,
                "attempt": manifest.attempt,
                "tensors": len(manifest.tensors),
                "files": len(manifest.files),
                "bytes": size,
                "seconds": seconds,
            }
        )
        return YES

    from shardproof.cli.words import counted, gigabytes, gigabytes_per_second

    click.echo(
        f"copied to {target.location}: {gigabytes(size)} in {counted(len(manifest.files), 'file')}, "
        f"{gigabytes_per_second(size, seconds)}; it refers to no other step"
    )
    return YES
