"""``shardproof ls`` and ``shardproof inspect``: the checkpoints of a run, and the contents of one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardproof.commands.cli.options import (
    checkpoint_of,
    folder_argument,
    format_option,
    json_option,
    path_or_run_argument,
    positive_span,
    print_json,
    register_option,
    trust_pickle_option,
    worker_options,
)
from shardproof.commands.cli.terminal import BAD, YES

if TYPE_CHECKING:
    from shardproof.commands.report import Measure, ObjectDetail, Summary, TensorDetail
    from shardproof.engine.format import TensorRecord


@click.command("ls", short_help="List the checkpoints of a run.")
@folder_argument("run")
@click.option(
    "--mtbf",
    callback=positive_span,
    metavar="SPAN",
    help="Suggest a time between saves, for a job that fails once in this time on average, such as 12h.",
)
@json_option
def ls_command(run: str, mtbf: float | None, as_json: bool) -> int:
    """List the checkpoints of RUN.

    An uncommitted step is listed with the reason: a save may be in progress, the save died (a leftover, see
    prune), or the checkpoint is damaged or lacks its manifest (see verify and repair). A suspect is the
    checkpoint of a step that failed validation. The list shows the verdict of a settled suspect. "state" is
    the bytes of a step's tensors, and "files" those of the files in its folder: less for an incremental step.

    The suggestion of --mtbf uses the times of the listed steps, and the time from the agreement of the ranks
    to the commit. Training that continues during a save is blocked for less time.
    """
    from dataclasses import asdict

    from shardproof.commands.report import interval_advice, scan_run
    from shardproof.engine.storage import storage_at

    storage = storage_at(run)
    infos = scan_run(storage)
    advice = None if mtbf is None else interval_advice(infos, storage.modified, mtbf)
    if as_json:
        found: dict[str, object] = {
            "location": storage.location,
            "checkpoints": [info.to_json() for info in infos],
        }
        if mtbf is not None:
            found["interval"] = None if advice is None else asdict(advice)
        print_json(found)
        return YES

    from shardproof._utils.humanize import age, counted, gigabytes
    from shardproof._utils.humanize import span as duration
    from shardproof.commands.cli.terminal import console, table

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
            gigabytes(info.bytes) if info.whole else "-",
            gigabytes(info.file_bytes),
            str(info.save.tensors) if info.whole else "-",
            "-" if info.save.world_size is None else str(info.save.world_size),
            info.status + (", repaired" if info.save.repaired else ""),
            info.reason
            or (f"{counted(info.unnamed, 'file')} of dead saves" if info.unnamed else "")
            or ("a symbolic link" if info.linked else "")
            or (f"pinned: {info.pinned}" if info.pinned is not None else ""),
        )
        for info in infos
    ]
    headings = ("step", "folder", "age", "state", "files", "tensors", "ranks", "status", "")
    out.print(table(headings, rows, right=("step", "age", "state", "files", "tensors", "ranks")))
    if advice is not None:
        interval, cost, between, suggested = map(
            duration, (advice.interval, advice.cost, advice.mtbf, advice.suggested)
        )
        out.print(
            f"\na save every {interval}, and {cost} until its commit (medians of {advice.saves} steps). With "
            f"a failure every {between} (--mtbf), the formula of Daly suggests a save every {suggested} if "
            "training waits for the commit. Training that continues during a save can save more often: "
            "`Checkpointer(mtbf_hours=...)` logs how often"
        )
    elif mtbf is not None:
        out.print("\nno time between saves is suggested: that needs two committed steps")
    return YES


WRITERS_SHOWN = 16
OBJECTS_SHOWN = 20
FOLDERS_SHOWN = 4


@click.command("inspect", short_help="Show what a checkpoint contains, and which rank wrote it.")
@path_or_run_argument("ckpt")
@click.argument("words", nargs=-1, metavar="[STEP] [KEY]")
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Words of a key that name a part of the tree.",
)
@format_option
@trust_pickle_option
@register_option
@json_option
def inspect_command(
    ckpt: str,
    words: tuple[str, ...],
    depth: int,
    format: str | None,  # noqa: A002 the name of the option
    trust_pickle: bool,
    register: Sequence[str],
    as_json: bool,
) -> int:
    """Show what CKPT contains, of any known format: tensors with layers folded, bytes by part and by file.

    CKPT is a checkpoint, or a run: then STEP of it, or its newest step that can be restored.

    With KEY, show a tensor with its shape, its dtype and the place of each chunk; or a plain value; or the
    summary of a part of the tree.
    """
    from shardproof.commands.report import describe, detail, summarise
    from shardproof.engine.foreign import foreign_of

    checkpoint, keys = checkpoint_of(ckpt, words, quiet=as_json)
    if len(keys) > 1:
        raise click.UsageError(f"expected one KEY, found {len(keys)}: {' '.join(keys)}")
    key = keys[0] if keys else None
    stored = describe(foreign_of(checkpoint), format=format, trust_pickle=trust_pickle)
    manifest, table = stored.manifest, stored.table
    found = detail(manifest, table, key) if key is not None else None
    if found is not None:
        if as_json:
            print_json(found.to_json())
        else:
            _show_detail(found)
        return YES
    summary = summarise(
        stored.location,
        manifest,
        table,
        prefix=key,
        depth=depth,
        format=stored.format,
        notes=stored.notes,
        unreadable=stored.unreadable,
    )
    if key is not None and not (summary.tensors or summary.objects or summary.aliases or summary.unreadable):
        from shardproof._utils.humanize import nearest

        stored_keys = [*(record.key for record in manifest.tensors), *manifest.aliases, *manifest.objects]
        near = ", ".join(nearest(key, stored_keys))
        advice = f"near it: {near}" if near else "run inspect without KEY to see the keys"
        raise click.UsageError(f"{stored.location} has no key {key!r}; {advice}")
    if as_json:
        print_json(summary.to_json())
    else:
        _show_summary(summary)
    return YES


def _show_origin(summary: Summary) -> None:
    """Prints where a checkpoint is, who saved it, and how much it has."""
    from shardproof._utils.humanize import age, counted, gigabytes, printable
    from shardproof.commands.cli.terminal import console

    out = console()
    where = summary.location + (f", {summary.prefix}" if summary.prefix else "")
    step = "no step" if summary.step is None else f"step {summary.step}"
    repaired = ", manifest rebuilt by repair" if summary.repaired else ""
    if summary.time is not None:
        out.print(printable(f"{where}: {step}, saved {age(time.time() - summary.time)} ago"), end="")
        out.print(f" by {counted(summary.world_size, 'rank')} ({printable(summary.writer)}){repaired}")
    else:
        out.print(printable(f"{where}: {step}, format {summary.format}"))
    out.print(
        f"{gigabytes(summary.bytes)} in {counted(summary.tensors, 'tensor')} and "
        f"{counted(summary.chunks, 'chunk')}, {counted(len(summary.aliases), 'tied tensor')}, "
        f"{counted(len(summary.objects), 'plain value')}"
    )
    if summary.referenced_bytes:
        folders = sorted({row.file.split("/")[0] for row in summary.writers if row.referenced})
        out.print(
            printable(
                f"saved incrementally: {gigabytes(summary.referenced_bytes)} of it lie in files of "
                f"{', '.join(folders[:FOLDERS_SHOWN])}{', ...' if len(folders) > FOLDERS_SHOWN else ''} "
                "(`shardproof convert --standalone` makes a copy that needs no other step)"
            )
        )


def _show_summary(summary: Summary) -> None:
    from shardproof._utils.humanize import gigabytes, printable
    from shardproof.commands.cli.terminal import console, table
    from shardproof.commands.report import fold

    out = console()
    _show_origin(summary)
    if summary.rows:
        out.print()
        rows = (
            (row.key, f"{row.count:,}", row.dtype, _listed(row.shape), gigabytes(row.bytes))
            for row in summary.rows
        )
        out.print(table(("tensor", "count", "dtype", "shape", "size"), rows, right=("count", "size")))
        out.print()
        parts = (
            (
                row.pattern,
                f"{row.count * row.label[0]:,}",
                gigabytes(row.count * row.label[1]),
                _share(row.count * row.label[1], summary.bytes),
            )
            for row in fold((part.part, (part.tensors, part.bytes)) for part in summary.parts)
        )
        out.print(table(("part", "tensors", "size", "share"), parts, right=("tensors", "size", "share")))
    if summary.writers:
        out.print()
        _show_writers(summary)
    if summary.aliases:
        out.print()
        ties = [(row.pattern, row.label) for row in fold(summary.aliases.items())]
        out.print(table(("tied tensor", "stored as"), ties))
    if summary.objects:
        out.print()
        values = [(row.pattern, f"{row.count:,}") for row in fold((key, None) for key in summary.objects)]
        out.print(table(("plain value", "count"), values[:OBJECTS_SHOWN], right=("count",)))
        if len(values) > OBJECTS_SHOWN:
            out.print(f"and {len(values) - OBJECTS_SHOWN:,} more (--json lists all)")
    if summary.unreadable:
        out.print()
        out.print(
            table(
                ("not readable", ""), [(row.pattern, row.label) for row in fold(summary.unreadable.items())]
            )
        )
    for note in summary.notes:
        out.print(printable(f"note: {note}"))
    if summary.metadata:
        out.print()
        rows_of_metadata = ((key, str(value)) for key, value in summary.metadata.items())
        out.print(table(("metadata", ""), rows_of_metadata))
    if summary.provenance:
        out.print()
        out.print(table(("saved by", ""), _rows_of_provenance(summary.provenance)))


def _rows_of_provenance(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The origin of a save as names and texts. Members of another form are shown as they are."""
    rest = dict(record)
    rows = []
    program, arguments = rest.pop("program", None), rest.pop("arguments", None)
    if program is not None and isinstance(arguments, list | None):
        rows.append(("program", " ".join(map(str, (program, *(arguments or ()))))))
    else:
        given = {"program": program, "arguments": arguments}.items()
        rows += [(name, str(value)) for name, value in given if value is not None]
    if "started" in rest:
        rows.append(("started", _moment(rest.pop("started"))))
    if isinstance(git := rest.get("git"), dict) and isinstance(changed := git.get("changed"), bool | None):
        states = {True: ", with changes", False: ", without changes", None: ""}
        rows.append(("git commit", f"{git.get('commit')}{states[changed]}"))
        del rest["git"]
    if isinstance(versions := rest.get("versions"), dict):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
        del rest["versions"]
    if isinstance(layout := rest.get("layout"), dict):
        rows += _rows_of_layout(layout)
        del rest["layout"]
    return [*rows, *((name, str(value)) for name, value in rest.items())]


def _moment(value: object) -> str:
    """Unix seconds as a date; another value as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    except (ValueError, OverflowError, OSError):
        return str(value)


def _rows_of_layout(layout: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The meshes and groups of a save; members of another form as they are."""
    for member, value in layout.items():
        name = {"meshes": "mesh"}.get(member, member)
        groups = value if member == "meshes" and isinstance(value, list) else [value]
        if not all(isinstance(group, dict) for group in groups):
            yield name, str(value)
        elif texts := ["x".join(f"{key}={size}" for key, size in group.items()) for group in groups if group]:
            yield name, "; ".join(texts)


def _show_writers(summary: Summary) -> None:
    from shardproof._utils.humanize import gigabytes
    from shardproof.commands.cli.terminal import console, table

    out = console()
    # The writers with the most bytes, to show an imbalance.
    most = sorted(summary.writers, key=lambda row: -row.bytes)[:WRITERS_SHOWN]
    rows = (
        (
            _rank(row.rank),
            f"{row.tensors:,}",
            f"{row.chunks:,}",
            gigabytes(row.bytes),
            _share(row.bytes, summary.bytes),
            row.file,
        )
        for row in sorted(most, key=lambda row: row.rank)
    )
    right = ("rank", "tensors", "chunks", "size", "share")
    out.print(table(("rank", "tensors", "chunks", "size", "share", "file"), rows, right=right))
    if len(summary.writers) > WRITERS_SHOWN:
        sizes = [row.bytes for row in summary.writers]
        out.print(
            f"the {WRITERS_SHOWN} largest of {len(sizes):,} writers; smallest {gigabytes(min(sizes))}, "
            f"mean {gigabytes(sum(sizes) / len(sizes))} (--json lists all)"
        )


def _show_detail(found: TensorDetail | ObjectDetail) -> None:
    from shardproof._utils.humanize import gigabytes, printable
    from shardproof.commands.cli.terminal import console, table
    from shardproof.commands.report import ObjectDetail, spelled

    out = console()
    if isinstance(found, ObjectDetail):
        out.print(printable(f"{found.key} = {spelled(found.value)}"))
        return
    tied = f", tied with {', '.join(found.tied)}" if found.tied else ""
    out.print(printable(f"{found.key}: {found.dtype} {_listed(found.shape)}, {gigabytes(found.bytes)}{tied}"))
    rows = (
        (
            _listed(f"{at}:{at + size}" for at, size in zip(chunk.offsets, chunk.sizes, strict=True)),
            _rank(chunk.rank),
            chunk.file,
            f"[{chunk.byte_start}, {chunk.byte_stop})",
            chunk.digest if chunk.digest.strip("0") else "-",
        )
        for chunk in found.chunks
    )
    if found.chunks:
        out.print()
        out.print(table(("box", "rank", "file", "bytes", "digest"), rows, right=("rank",)))


def _rank(rank: int) -> str:
    return "-" if rank < 0 else str(rank)


def _listed(items: Iterable[object]) -> str:
    return f"[{', '.join(map(str, items))}]"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


TENSORS_SHOWN = 100
LONGEST_BAR = 40


@click.command("stats", short_help="Measure the numbers of the tensors of a checkpoint.")
@path_or_run_argument("ckpt")
@click.argument("keys", nargs=-1, metavar="[STEP] [KEY]...")
@format_option
@worker_options("read")
@json_option
def stats_command(ckpt: str, keys: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Measure the tensors of CKPT: smallest, largest, mean, norm, zeros, NaN and infinities.

    CKPT is a checkpoint of any known format, or a run: then STEP of it, or its newest step that can be
    restored. A KEY names a tensor, a part of the tree, or a pattern. For one tensor, the numbers are also
    counted by magnitude.

    Exit code 0: no tensor has NaN or infinities. 1: one has, or the checkpoint is damaged.
    """
    from shardproof.commands.cli.terminal import bytes_progress
    from shardproof.commands.report import measure_tensors
    from shardproof.engine.foreign import foreign_of
    from shardproof.errors import KeyMismatchError

    checkpoint, patterns = checkpoint_of(ckpt, keys, quiet=as_json)
    place = foreign_of(checkpoint)
    try:
        with bytes_progress("stats", shown=not as_json) as on_progress:
            found = measure_tensors(place, patterns, on_progress=on_progress, **options)
    except KeyMismatchError as error:  # a KEY fits no tensor
        raise click.UsageError(f"{error} (`shardproof inspect` lists the keys)") from error
    bad = any(measure.nan or measure.inf for _, measure in found)
    if as_json:
        print_json(
            {
                "location": place.location,
                "tensors": [
                    {
                        "key": tensor.key,
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        **measure.to_json(),
                    }
                    for tensor, measure in found
                ],
            }
        )
    else:
        _show_measures(found)
    return BAD if bad else YES


def _show_measures(found: Sequence[tuple[TensorRecord, Measure]]) -> None:
    from shardproof._utils.humanize import counted
    from shardproof.commands.cli.terminal import console, table

    out = console()
    # Tensors with NaN or infinities first.
    order = sorted(found, key=lambda pair: not (pair[1].nan or pair[1].inf))
    rows = [
        (
            tensor.key,
            tensor.dtype,
            f"{measure.count:,}",
            *("-" if value is None else f"{value:.4g}" for value in (measure.low, measure.high)),
            f"{measure.mean:.4g}",
            f"{measure.norm.value:.4g}",
            *(f"{count:,}" if count else "" for count in (measure.zeros, measure.nan, measure.inf)),
        )
        for tensor, measure in order[:TENSORS_SHOWN]
    ]
    numbers = ("numbers", "min", "max", "mean", "norm", "zeros", "NaN", "Inf")
    out.print(table(("tensor", "dtype", *numbers), rows, right=numbers))
    if len(found) > TENSORS_SHOWN:
        out.print(f"and {len(found) - TENSORS_SHOWN:,} more (--json lists all)")
    bad = sum(bool(measure.nan or measure.inf) for _, measure in found)
    out.print(f"\n{counted(len(found), 'tensor')}, {bad:,} with NaN or infinities")
    if len(found) == 1:
        bins = found[0][1].to_json()["magnitudes"]
        most = max(bins.values(), default=1)
        cells = [
            (f"2^{power}", f"{count:,}", "█" * max(1, round(LONGEST_BAR * count / most)))
            for power, count in bins.items()
        ]
        out.print()
        out.print(table(("magnitude from", "numbers", ""), cells, right=("magnitude from", "numbers")))
