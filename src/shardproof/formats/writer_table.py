"""The table of the formats that can be written: which writer writes each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from shardproof.formats.writer import FormatWriter

WRITERS: Mapping[str, str] = {
    "shardproof": "shardproof_writer:NativeWriter",
    "safetensors": "safetensors.safetensors_writer:SafetensorsWriter",
    "hf": "safetensors.safetensors_writer:HuggingFaceWriter",
    "dcp": "dcp.dcp_writer:DcpWriter",
    "fsdp_dtensor": "dcp.dcp_writer:FsdpDTensorWriter",
    "torch_dist": "megatron.megatron_writer:TorchDistWriter",
    "torch": "torch.torch_writer:TorchWriter",
    "zarr": "zarr.zarr_writer:ZarrWriter",
}
"""Name of each format that can be written to the module and class of its writer."""


def writer_of(name: str) -> type[FormatWriter]:
    """The writer of a format.

    Raises:
        ValueError: no writer has this name.
    """
    if name not in WRITERS:
        raise ValueError(f"a checkpoint is written as one of {', '.join(WRITERS)}, not {name!r}")
    module, _, attribute = WRITERS[name].partition(":")
    writer: type[FormatWriter] = getattr(import_module(f"shardproof.formats.{module}"), attribute)
    return writer
