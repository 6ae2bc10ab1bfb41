"""Functions for the scripts of this folder: to return a result to `run_peer`, and to join the other ranks.

A script runs in an environment of its own and imports only the packages of that environment and the modules
of this folder. It adds what it read to a `Result` and calls `write` once, on rank 0:

    result = Result()
    result.add_tensor("weight", tensor)
    result.add_object("step", 7)
    result.facts["version"] = torch.__version__
    result.write()
"""

from __future__ import annotations

import base64
import collections
import io
import json
import math
import os
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

__all__ = ["Result", "encoded", "flattened", "is_tensor", "join_ranks", "leave_ranks", "rank", "world_size"]

_LARGEST_JSON_INTEGER = 1 << 53


class Result:
    """Tensors, objects and facts, written as two files in the folder that `run_peer` made."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        """Plain JSON values about the read: versions, missing keys, refusals."""
        self._kinds: dict[str, list[Any]] = {}
        self._bytes: dict[str, bytes] = {}

    def add_tensor(self, key: str, tensor: Any) -> None:
        """Adds a whole tensor of torch or array of numpy."""
        dtype, shape, data = _bits(tensor)
        self._kinds[key] = [dtype, shape]
        self._bytes[key] = data

    def add_object(self, key: str, value: Any) -> None:
        """Adds a value that is no tensor."""
        self.objects[key] = encoded(value)

    def add_tree(self, tree: Any) -> None:
        """Adds every leaf of nested dicts and lists, under its path joined by dots."""
        for key, leaf in flattened(tree).items():
            if is_tensor(leaf):
                self.add_tensor(key, leaf)
            else:
                self.add_object(key, leaf)

    def write(self) -> None:
        """Writes `tensors.safetensors`, where every tensor is a row of bytes, and `result.json`."""
        folder = Path(os.environ["PEER_RESULT"])
        header, place = {}, 0
        for key, data in self._bytes.items():
            header[key] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [place, place + len(data)]}
            place += len(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / "tensors.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for data in self._bytes.values():
                file.write(data)
        content = {"tensors": self._kinds, "objects": self.objects, "facts": self.facts}
        (folder / "result.json").write_text(json.dumps(content))


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """The number of processes that `run_peer` started."""
    return int(os.environ["WORLD_SIZE"])


def join_ranks(backend: str = "gloo") -> None:
    """Starts torch's default process group, through a file in the result folder."""
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(os.environ["PEER_RESULT"], "store"), world_size())
    limit = timedelta(seconds=float(os.environ["PEER_TIMEOUT"]))
    dist.init_process_group(backend, store=store, rank=rank(), world_size=world_size(), timeout=limit)


def join_ranks_on_devices() -> None:
    """Does as `join_ranks`. Where there is CUDA, each rank takes a device, and NCCL serves its tensors."""
    import torch

    if not torch.cuda.is_available():
        join_ranks()
        return
    torch.cuda.set_device(rank())
    join_ranks("cpu:gloo,cuda:nccl")


def leave_ranks(result: Result) -> NoReturn:
    """Writes the result on rank 0, and ends this process when every rank is here.

    The interpreter's teardown is left out: threads of gloo abort the process in it now and then.
    """
    import torch.distributed as dist

    if rank() == 0:
        result.write()
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def is_tensor(value: Any) -> bool:
    """True for a tensor of torch, without an import of torch."""
    return hasattr(value, "untyped_storage")


def flattened(tree: Any) -> dict[str, Any]:
    """The leaves of nested dicts and lists by path, as torch's distributed checkpoints name them.

    A dict is descended unless it is empty. A list is descended only if it has a tensor, a dict or such
    a list.
    """
    leaves: dict[str, Any] = {}
    _flatten("", tree, leaves)
    return leaves


def encoded(value: Any) -> Any:
    """A value as JSON that keeps its type: plain, or a dict whose `$` names the type.

    The encoding is that of `expected.json` in the golden checkpoints of `tests/golden/peers`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):  # before float: numpy's float64 is one
        data = base64.b64encode(value.tobytes()).decode()
        return {"$": "scalar", "dtype": value.dtype.str, "v": data}
    if isinstance(value, int) and type(value) is int:
        if -_LARGEST_JSON_INTEGER < value < _LARGEST_JSON_INTEGER:
            return value
        return {"$": "int", "v": str(value)}
    if isinstance(value, float):
        return {"$": "float", "v": _hexadecimal(value)}
    if isinstance(value, complex):
        return {"$": "complex", "v": [_hexadecimal(value.real), _hexadecimal(value.imag)]}
    if isinstance(value, bytes):
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, io.BytesIO):
        return {"$": "BytesIO", "v": base64.b64encode(value.getvalue()).decode()}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(value.tobytes()).decode()
        return {"$": "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "v": data}
    if is_tensor(value):
        dtype, shape, data = _bits(value)
        return {"$": "tensor", "dtype": dtype, "shape": shape, "v": base64.b64encode(data).decode()}
    if isinstance(value, collections.abc.Mapping):
        pairs = [[encoded(key), encoded(item)] for key, item in value.items()]
        return {"$": "dict", "of": type(value).__name__, "v": pairs}
    if isinstance(value, set | frozenset):
        return {"$": type(value).__name__, "v": sorted((encoded(item) for item in value), key=json.dumps)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "torch.Size":
        return {"$": "size", "v": list(value)}
    if kind in ("torch.dtype", "torch.device"):
        return {"$": kind.removeprefix("torch."), "v": str(value)}
    if isinstance(value, tuple):
        return {"$": "tuple", "v": [encoded(item) for item in value]}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if hasattr(value, "__dict__"):
        return {"$": "object", "of": kind, "v": [[name, encoded(item)] for name, item in vars(value).items()]}
    return {"$": "opaque", "of": kind, "v": repr(value)}


def _flatten(path: str, value: Any, leaves: dict[str, Any]) -> None:
    if isinstance(value, collections.abc.Mapping) and value:
        items: Any = value.items()
    elif isinstance(value, list) and _is_descended(value):
        items = enumerate(value)
    else:
        leaves[path] = value
        return
    for name, item in items:
        _flatten(f"{path}.{name}" if path else str(name), item, leaves)


def _is_descended(value: list[Any]) -> bool:
    return any(
        is_tensor(item)
        or isinstance(item, collections.abc.Mapping)
        or (isinstance(item, list) and _is_descended(item))
        for item in value
    )


def _hexadecimal(value: float) -> str:
    return value.hex() if math.isfinite(value) else str(value)


def _bits(tensor: Any) -> tuple[str, list[int], bytes]:
    """Torch's name of the dtype, the shape, and the elements in row-major order, little-endian."""
    if not is_tensor(tensor):
        array = np.asarray(tensor)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return array.dtype.name, list(array.shape), array.tobytes()
    import torch

    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if not tensor.numel():
        return dtype, shape, b""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dtype, shape, dense.view(torch.uint8).numpy().tobytes()
