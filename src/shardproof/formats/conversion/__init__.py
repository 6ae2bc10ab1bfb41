"""Conversion of checkpoints between formats: planned, written in units, verified, published."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from operator import index

from shardproof._utils.arguments import check_mapping, check_texts, check_whole, wrong_type
from shardproof.engine.rendezvous import Rendezvous
from shardproof.engine.storage import StrOrBytesPath, is_url
from shardproof.formats.conversion.conversion_protocol import ConversionReport, carry_out
from shardproof.formats.conversion.key_maps import KeyMap, KeyMapFunction, MappedTensor, Move
from shardproof.formats.conversion.plan import ConversionRequest
from shardproof.reentrance import refuse_inside
from shardproof.workers import Where

__all__ = [
    "ConversionReport",
    "ConversionRequest",
    "KeyMap",
    "KeyMapFunction",
    "MappedTensor",
    "Move",
    "Where",
    "convert",
]

_PATTERNS = "a pattern, a list of patterns or None"


def convert(
    source: StrOrBytesPath,
    destination: StrOrBytesPath,
    *,
    to: str,
    format: str | None = None,  # noqa: A002 as in sp.open
    dtype: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    key_map: KeyMap | None = None,
    like: str | os.PathLike[str] | None = None,
    max_file_bytes: int | None = None,
    memory_bytes: int = 4 << 30,
    workers: int = 1,
    on: Where = "processes",
    trust_pickle: bool = False,
    register: str | Sequence[str] = (),
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    rendezvous: Rendezvous | None = None,
    deadline: float | None = None,
) -> ConversionReport:
    """Converts a checkpoint to another format. Under ``torchrun``, every rank calls it.

    The new checkpoint is written to a sibling folder of the destination, verified, and then moved to the
    destination. For an object store, this work folder is in the folder of temporary files (``TMPDIR``), and
    the files are uploaded and read again. After an interruption, the same call continues where it stopped.
    Processes and ranks share the work by units, most often files.

    Args:
        source: a checkpoint of any known format: its folder or file.
        destination: path or URL of the new checkpoint. A name that ends in ``.safetensors`` (formats
            "safetensors" and "hf") or in ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` ("torch") gets one file,
            other names a folder.
        to: name of the format to write. docs/formats.md lists the names.
        format: name of the stored format; None to find it.
        dtype: torch's name of the dtype that floating point tensors are converted to; None to leave them.
        include: patterns (`fnmatch`, over the whole key or the keys above it) of the keys to convert; None
            for all.
        exclude: patterns of the keys to leave out.
        rename: stored key to written key, for a key and all below it. The longest stored key that
            matches is used. An empty written key removes the prefix. `shardproof.load` maps the other way.
        key_map: a map between the keys of two projects: a name such as "megatron-to-hf:llama", the path of a
            TOML file, or a function. The function gets the dtype and shape of each stored tensor by key, and
            the plain values. It returns a `MappedTensor` for each key to write. With a key map, plain values
            are not written. With several worker processes, pickle must be able to send the function to them.
        like: for the format "hf", the local folder of a model that ``from_pretrained`` loads. Its
            configuration and tokenizer are copied beside the weights. The first rank reads it.
        max_file_bytes: bytes of tensors in one file, at most; None for the format's default.
        memory_bytes: memory of all processes together, above that of their libraries.
        workers: processes that write units, on each machine. Several processes import the main module: a
            script calls `convert` below ``if __name__ == "__main__":``.
        on: "processes" for processes of this machine, "ray" for a Ray cluster.
        trust_pickle: True to unpickle values that are not plain data. This may run code in the checkpoint.
        register: modules to import, and full names of enums and dataclasses to register, in every worker.
            Workers do not know the classes that this process registered.
        dry_run: True to plan and to write nothing.
        on_progress: called with the bytes done and the total. Each byte counts when it is written and when it
            is verified. For an object store, it also counts when it is sent and when it is compared.
        rendezvous: where the ranks meet; found by itself when None.
        deadline: seconds that a rank may be silent (see `shardproof.load`), and that the workers may go
            without progress.

    Returns:
        What was converted.

    Raises:
        TypeError: an argument has a wrong type.
        AlreadyCommittedError: there is something at the destination.
        PlainDataError, StructureError, ValueError: the request does not fit the checkpoint or the format.
        CorruptChunkError, FormatError, StorageError, TilingError: the stored checkpoint is damaged, or the
            new one could not be written. Nothing is published.
        RankFailure, RankSilent: some rank failed or fell silent.

    Example:
        >>> import shardproof as sp, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> _ = sp.save(f"{folder}/step", {"w": torch.ones(2)})
        >>> sp.convert(f"{folder}/step", f"{folder}/model.safetensors", to="safetensors").verified
        8
    """
    refuse_inside("convert")
    check_mapping("rename", rename, "a dict of key to key, or None", texts=True)
    check_whole("max_file_bytes", max_file_bytes, "of bytes")
    check_whole("memory_bytes", memory_bytes, "of bytes", optional=False)
    check_whole("workers", workers, "of processes", optional=False)
    destination = _path("destination", destination)
    request = ConversionRequest(
        _path("source", source),
        destination,
        to,
        format=format,
        dtype=dtype,
        include=None if include is None else _texts("include", include, _PATTERNS),
        exclude=None if exclude is None else _texts("exclude", exclude, _PATTERNS),
        rename=dict(rename or {}),
        key_map=key_map,
        max_file_bytes=None if max_file_bytes is None else index(max_file_bytes),
        memory_bytes=index(memory_bytes),
        workers=index(workers),
        trust_pickle=trust_pickle,
        register=_texts("register", register, "a module, a full name or a list of them"),
        like="" if like is None else _path("like", like, "the path of a folder, or None"),
        temporary=tempfile.gettempdir() if is_url(destination) else "",
    )
    if callable(key_map) and request.workers > 1 and on == "processes":
        try:
            ForkingPickler.dumps(key_map)
        except Exception as error:
            raise ValueError(
                f"key_map cannot be sent to worker processes ({error}): define it in a module, or give "
                "workers=1"
            ) from error
    return carry_out(
        request, on=on, dry_run=dry_run, on_progress=on_progress, rendezvous=rendezvous, deadline=deadline
    )


def _path(name: str, value: StrOrBytesPath, takes: str = "a path or a URL") -> str:
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise wrong_type(name, value, takes)
    return os.fsdecode(value)


def _texts(name: str, value: str | Sequence[str], takes: str) -> list[str]:
    check_texts(name, value, takes)
    if value is None:
        raise wrong_type(name, value, takes)
    return [value] if isinstance(value, str) else list(value)
