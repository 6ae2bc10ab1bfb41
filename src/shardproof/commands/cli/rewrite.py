"""``shardproof convert`` and ``shardproof repair``: rewrite a checkpoint, rebuild a manifest."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shardproof.commands.cli.options import (
    checkpoint_argument,
    destination_argument,
    format_option,
    json_option,
    key_options,
    path_argument,
    print_json,
    register_option,
    renames_of,
    size,
    trust_pickle_option,
    worker_options,
)
from shardproof.commands.cli.terminal import YES, BadPath, bytes_progress

if TYPE_CHECKING:
    from shardproof.formats.conversion import ConversionReport

FORMATS = ("shardproof", "dcp", "torch_dist", "fsdp_dtensor", "zarr", "safetensors", "hf", "torch")
"""Formats that can be written; the keys of `shardproof.formats.WRITERS`, which would import numpy."""
KEYS_SHOWN = 20


@click.command(
    "convert", short_help="Write a checkpoint in another format, or copy a step without references."
)
@path_argument("src")
@destination_argument("dst")
@click.option("--to", type=click.Choice(FORMATS), help="Format to write.")
@click.option(
    "--standalone", is_flag=True, help="Make the copy of an incremental step refer to no other step."
)
@format_option
@click.option("--dtype", metavar="DTYPE", help="Convert floating point tensors, for example to bfloat16.")
@key_options("convert")
@click.option(
    "--map",
    "key_map",
    metavar="MAP",
    help="Key map, such as megatron-to-hf:llama?heads=32&groups=8, or a TOML file.",
)
@click.option(
    "--like",
    type=click.Path(),
    metavar="FOLDER",
    help="Model whose configuration and tokenizer are copied, for --to hf.",
)
@click.option(
    "--max-file-size",
    "max_file_bytes",
    callback=size,
    metavar="SIZE",
    help="Split into files of at most this size.",
)
@click.option(
    "--memory",
    "memory_bytes",
    callback=size,
    default="4GiB",
    show_default=True,
    help="Memory of all workers.",
)
@worker_options("write")
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@trust_pickle_option
@register_option
@json_option
def convert_command(
    src: str,
    dst: str,
    to: str | None,
    standalone: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Write the checkpoint SRC, of any known format, as the new checkpoint DST.

    The conversion reads and writes within --memory, verifies what it wrote, and moves it to DST last. After
    an interruption, the same command continues where it stopped. Under torchrun, the ranks share the work.

    With --standalone, the copy of an incremental step has all its bytes and can be moved anywhere. It loads
    as SRC does: the same tensors, plain values, step, time, metadata and world size.

    Exit code 0: converted. 1: SRC is damaged or not committed, or there is something at DST, which is
    unchanged. 2: an option fits neither SRC nor the format, or another conversion uses DST.
    """
    if standalone:
        _refuse_options_of_formats()
        if os.path.isfile(src):
            raise BadPath(f"SRC: {src!r} is a file, expected the folder of a step")
        return _make_standalone(src, dst, dry_run, as_json)
    if to is None:
        raise click.UsageError(
            f"name the format to write: --to {'|'.join(FORMATS)}; or give --standalone for a copy that "
            "refers to no other step"
        )
    keys: dict[str, Any] = {name: options.pop(name) or None for name in ("include", "exclude")}
    keys["rename"] = renames_of(options.pop("rename")) or None
    from shardproof.errors import PlainDataError, StructureError
    from shardproof.formats.conversion import convert

    try:
        with bytes_progress("convert", shown=not as_json) as on_progress:
            report = convert(
                src,
                dst,
                to=to,
                dry_run=dry_run,
                on_progress=on_progress,
                **keys,
                **options,
            )
    except (ValueError, StructureError, PlainDataError) as error:  # the request does not fit
        raise click.UsageError(str(error)) from error
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(report))
    else:
        _show_conversion(report)
    return YES


def _show_conversion(report: ConversionReport) -> None:
    from shardproof._utils.humanize import counted, gigabytes, gigabytes_per_second, printable

    contents = f"{counted(report.tensors, 'tensor')}, {counted(report.objects, 'plain value')}"
    if report.dry_run:
        click.echo(
            printable(
                f"would write {report.location} as {report.format}: {contents}, {gigabytes(report.bytes)} in "
                f"{counted(report.units, 'unit')}"
            )
        )
    else:
        click.echo(
            printable(
                f"converted to {report.location} ({report.format}): {contents}, {gigabytes(report.bytes)}, "
                f"{gigabytes(report.verified)} verified, in {report.seconds:.1f} s at "
                f"{gigabytes_per_second(report.bytes, report.seconds)}"
            )
        )
        if report.resumed:
            click.echo(f"{report.resumed} of {counted(report.units, 'unit')} were written by an earlier run")
    if report.left_out:
        shown = ", ".join(report.left_out[:KEYS_SHOWN])
        more = ", ..." if len(report.left_out) > KEYS_SHOWN else ""
        click.echo(printable(f"left out: {counted(len(report.left_out), 'key')}: {shown}{more}"))
    for note in report.notes:
        click.echo(printable(f"note: {note}"))


def _refuse_options_of_formats() -> None:
    """Refuses options that change a conversion to another format, together with --standalone."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in ("standalone", "dry_run", "as_json")
        and parameter.name is not None
        and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
    ]
    if "--to" in given:
        raise click.UsageError("give --to or --standalone, not both")
    if given:
        raise click.UsageError(
            f"{', '.join(given)} {'does' if len(given) == 1 else 'do'} not go with --standalone, "
            "which copies a step as it is: leave out one of them"
        )


def _make_standalone(src: str, dst: str, dry_run: bool, as_json: bool) -> int:
    from dataclasses import asdict

    from shardproof._utils.humanize import counted, gigabytes, gigabytes_per_second, printable
    from shardproof.engine.storage import storage_at
    from shardproof.runs.maintenance import make_standalone, plan_standalone

    source, target = storage_at(src), storage_at(dst)
    if dry_run:
        plan = plan_standalone(source, target)
        if as_json:
            places = {"source": source.location, "location": target.location}
            print_json({**places, **asdict(plan), "dry_run": True})
            return YES
        click.echo(
            printable(
                f"would copy to {target.location}: {counted(plan.tensors, 'tensor')}, "
                f"{gigabytes(plan.bytes)} in {counted(plan.files, 'file')}"
            )
        )
        return YES
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
                "dry_run": False,
            }
        )
        return YES
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
    nothing to repair: use verify. Exit code 1: CKPT cannot be repaired; the error names the reason.
    """
    from shardproof._utils.humanize import counted, gigabytes
    from shardproof.commands.report import tensor_bytes
    from shardproof.engine.storage import UncachedStorage, is_url, storage_at
    from shardproof.errors import AlreadyCommittedError
    from shardproof.runs.maintenance import repair

    storage = storage_at(ckpt) if is_url(ckpt) else UncachedStorage(ckpt)
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
