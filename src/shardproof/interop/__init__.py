"""Files of other projects, read as data: nothing that a pickle names is imported or called."""

from shardproof.interop.dcp import DcpCheckpoint, DcpChunk, DcpTensor
from shardproof.interop.pickle_data import Opaque, Pickle, read_pickle
from shardproof.interop.torch_file import TorchFile, TorchTensor, flatten

__all__ = [
    "DcpCheckpoint",
    "DcpChunk",
    "DcpTensor",
    "Opaque",
    "Pickle",
    "TorchFile",
    "TorchTensor",
    "flatten",
    "read_pickle",
]
