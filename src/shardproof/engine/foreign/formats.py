"""The table of foreign formats: which reader opens a path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from shardproof._utils.humanize import listed
from shardproof.engine.foreign.reader import Foreign, FormatReader, foreign_faults
from shardproof.engine.format import MANIFEST_NAME, inner_tensors, naming_other_files, shard_name
from shardproof.errors import FormatError

NATIVE = "shardproof"
"""Name of the project's own format."""

_SHARDS = shard_name(0, "a").partition("/")[0]
"""The folder of shard files."""
READERS: Mapping[str, str] = {
    "orbax": "orbax:OrbaxReader",
    "megatron_zarr": "megatron.megatron_dist:MegatronZarrReader",
    "zarr": "zarr.zarr:ZarrReader",
    "torch_dist": "megatron.megatron_dist:MegatronDistReader",
    "deepspeed_universal": "deepspeed_readers:DeepSpeedUniversalReader",
    "deepspeed": "deepspeed_readers:DeepSpeedReader",
    "torch_checkpointing": "torch.torch_checkpointing:TorchCheckpointingReader",
    "verl": "verl:VerlReader",
    "torchsnapshot": "torchsnapshot:TorchSnapshotReader",
    "dcp": "dcp_reader:DcpReader",
    "dcp_raw": "dcp_reader:DcpRawReader",
    "bytecheckpoint": "bytecheckpoint:ByteCheckpointReader",
    "dcp_safetensors": "safetensors_files:DcpSafetensorsReader",
    "torch": "torch.torch_save:TorchSaveReader",
    "megatron_legacy": "megatron.megatron_legacy:MegatronLegacyReader",
    "megatron_legacy_merged": "megatron.megatron_legacy:MegatronLegacyMergedReader",
    "accelerate": "huggingface:AccelerateReader",
    "hf_trainer": "huggingface:TrainerReader",
    "safetensors": "safetensors_files:SafetensorsReader",
    "hf_bin": "huggingface:HfBinReader",
}
"""Name of each format to the module and class of its reader, in the order in which readers are tried."""


def _class(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(f"shardproof.formats.{module}"), attribute)


def format_of(foreign: Foreign) -> str:
    """The name of the format of a path.

    A folder with shard files has shardproof's own format, even without a manifest. It is a save that did not
    finish, and a reader of another format must not open it. A folder that no reader recognizes also counts as
    shardproof's own format.

    Raises:
        FormatError: the path is a file of no known format.
    """
    if foreign.has(MANIFEST_NAME) or (foreign.file is None and _SHARDS in foreign.storage.folders()):
        return NATIVE
    for name, place in READERS.items():
        with suppress(FormatError), foreign_faults(foreign.location):
            if _class(place).recognizes(foreign):
                return name
    if foreign.file is not None:
        with naming_other_files(foreign.storage):
            raise FormatError(
                f"{foreign.location} is not a checkpoint of a known format ({', '.join(READERS)}). Name its "
                "format with format=, or on the command line with --format (the second path of diff: "
                "--other-format)",
                file=foreign.location,
            )
    return NATIVE


def keeps_tensors_of_values(format: str) -> bool:  # noqa: A002 as in sp.open
    """True if a format keeps arrays, bytes and long lists of plain values as tensors with keys of their own.

    Other formats store each value whole, and to look into one might read a file.
    """
    return format == NATIVE


def tensors_in_values(format: str, objects: Mapping[str, Any], keys: Iterable[str]) -> set[str]:  # noqa: A002
    """Of the keys of tensors, those that are parts of plain values, which users see as the values.

    >>> tensors_in_values("shardproof", {"a": {"$tensor": "a.@data", "kind": "array"}}, ["a.@data", "w"])
    {'a.@data'}
    """
    return inner_tensors(objects, keys) if keeps_tensors_of_values(format) else set()


def open_reader(foreign: Foreign, name: str) -> FormatReader:
    """Opens a checkpoint of another project.

    Raises:
        ValueError: no format has this name.
        FormatError: the metadata is damaged.
        NotCommittedError: the save of the checkpoint did not finish.
        StorageError: a file of the metadata is missing or unreadable.
    """
    if name not in READERS:
        raise ValueError(f"format is one of {', '.join([NATIVE, *READERS])}, not {name!r}")
    with naming_other_files(foreign.storage), foreign_faults(foreign.location):
        reader: FormatReader = _class(READERS[name])(foreign)
    if reader.unreadable:
        kinds = [f"{key} ({value.kind})" for key, value in reader.unreadable.items()]
        reader.notes.append(f"Not readable: {listed(kinds)}. All other keys are readable.")
    return reader
