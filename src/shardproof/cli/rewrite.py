"""``shardproof convert`` and ``shardproof repair``: copy a checkpoint, rebuild a manifest."""

from __future__ import annotations

import click

from shardproof.cli.failures import YES
from shardproof.cli.options import checkpoint_argument, json_option, print_json

__all__ = ["convert_command", "repair_command"]


@click.command("convert", short_help="Copy a step so that it needs no other.")
@checkpoint_argument("src")
@click.argument("dst", type=click.Path())
@click.option("--standalone", is_flag=True, help="Make the copy refer to no other step.")
@json_option
def convert_command(src: str, dst: str, standalone: bool, as_json: bool) -> int:
    """Copy the checkpoint SRC to the folder DST and verify every chunk.

    With --standalone, the copy of an incremental step has all its bytes and can be moved anywhere. It loads
    as SRC does: the same tensors, plain values, step, time, metadata and world size. Exit code 0: copied. 1:
    SRC is damaged or not committed, or DST holds a checkpoint; DST is unchanged.
    """
    if not standalone:
        raise click.UsageError(
            "no form of copy given: add --standalone for a copy that refers to no other step"
        )

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

    from shardproof._utils.humanize import counted, gigabytes, gigabytes_per_second

    click.echo(
        f"copied to {target.location}: {gigabytes(size)} in {counted(len(manifest.files), 'file')}, "
        f"{gigabytes_per_second(size, seconds)}; it refers to no other step"
    )
    return YES


@click.command("repair", short_help="Rebuild a lost manifest from the shard files.")
@checkpoint_argument("ckpt")
@json_option
def repair_command(ckpt: str, as_json: bool) -> int:
    """Rebuild the manifest and index of CKPT from its shard files, and commit it.

    Every chunk is checked against the digest in its file. If manifest and index are readable, there is
    nothing to repair: use verify. Exit code 1: CKPT cannot be repaired, with the reason.
    """
    from shardproof._utils.humanize import counted, gigabytes
    from shardproof.errors import AlreadyCommittedError
    from shardproof.maintenance import repair
    from shardproof.report import tensor_bytes
    from shardproof.storage import UncachedStorage

    storage = UncachedStorage(ckpt)
    try:
        manifest = repair(storage)
    except AlreadyCommittedError as error:
        if as_json:
            print_json({"location": storage.location, "repaired": False, "reason": error.message})
        else:
            click.echo(error.message)
        return YES
    size = sum(tensor_bytes(record) for record in manifest.tensors)
    if as_json:
        print_json(
            {
                "location": storage.location,
                "repaired": True,
                "step": manifest.step,
                "attempt": manifest.attempt,
                "tensors": len(manifest.tensors),
                "objects": len(manifest.objects),
                "bytes": size,
                "files": len(manifest.files),
            }
        )
    else:
        click.echo(
            f"repaired: {storage.location}: {counted(len(manifest.tensors), 'tensor')}, {gigabytes(size)}, "
            f"from {counted(len(manifest.files), 'shard file')}, every chunk verified"
        )
    return YES
