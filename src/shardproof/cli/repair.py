"""``shardproof repair``: a manifest from the shard files."""

from __future__ import annotations

import click

from shardproof.cli.failures import YES
from shardproof.cli.options import checkpoint_argument, json_option, print_json

__all__ = ["command"]


@click.command("repair", short_help="Rebuild a lost manifest from the shard files.")
@checkpoint_argument("ckpt")
@json_option
def command(ckpt: str, as_json: bool) -> int:
    """Rebuild the manifest and index of CKPT from its shard files, and commit it.

    Every chunk is read and checked against the digest that its file carries. Where manifest and index are
    readable there is nothing to repair: use verify. Exit code 1: it cannot be repaired, with the reason.
    """
    from shardproof.cli.words import counted, gigabytes
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
