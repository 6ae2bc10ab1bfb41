"""The states of the golden checkpoints: built the same by the script that wrote them and by their test.

Each state is a function of the rank and the number of ranks. On one rank every tensor is whole, so that the
state of one rank is the target for what any number of ranks saved. A blank state has the same structure and
other values.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

import shardproof as sp
from shardproof import layouts, rerun

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float4_e2m1fn_x2", "complex32", "complex64", "complex128"),
)
"""Every dtype of docs/format.md. A torch that lacks one leaves it out of the target."""

METADATA = {
    "run": "golden",
    "tokens": 1 << 40,
    "betas": (0.9, 0.95),
    "note": "größer",
    "array": np.arange(3, dtype=np.float16),
    "tensor": torch.arange(3),
}


@dataclasses.dataclass
class Progress:
    """A dataclass that checkpoints hold."""

    tokens: int
    epoch: float


class Stage(enum.Enum):
    """An enum that checkpoints hold."""

    WARMUP = 1
    DECAY = 2


sp.register_dataclass(Progress, name="golden.Progress")
sp.register_enum(Stage, name="golden.Stage")


def pattern(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes follow from its size and the seed. No byte is above 119: no float is NaN."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    count = math.prod(shape) * itemsize
    data = (torch.arange(count, dtype=torch.int64) * 37 + 11 * seed + 5) % (2 if dtype is torch.bool else 120)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def plain(rank: int, ranks: int, *, blank: bool = False) -> dict[str, Any]:
    """Tensors of every dtype and layout, plain data of every kind, and values of each rank."""
    seed = 50 if blank else 0

    def whole(*shape: int, dtype: torch.dtype = torch.float32, at: int = 0) -> torch.Tensor:
        return pattern(dtype, *shape, seed=seed + at)

    tied = whole(3, 5, at=3)
    numbers = np.random.default_rng(seed)
    mine = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {
        "dtypes": {
            name: whole(3, 2, dtype=getattr(torch, name), at=at)
            for at, name in enumerate(DTYPES)
            if hasattr(torch, name)
        },
        "zero_dim": whole(at=1),
        "zero_dim_int": torch.tensor(-1 if blank else 12345),
        "empty": torch.zeros(0, 3),
        "empty_bfloat16": torch.zeros(4, 0, dtype=torch.bfloat16),
        "strided": whole(4, 3, at=2).t(),
        "tied": {"first": tied, "second": tied},
        "names": {"ünïcode": whole(2, at=4), "with space [0:1]": whole(2, at=5)},
        "many_dims": whole(1, 2, 1, 2, 1, at=6),
        "sequence": [whole(2, at=7), {"inner": whole(3, at=8)}],
        "rows": shard(whole(7, 3, at=9), rank, ranks, cut=5),
        "one_holder": shard(whole(2, 2, at=10), rank, ranks, cut=2),
        "flat": flat(whole(4, 5, at=11), rank, ranks, cut=8),
        "dtensor_rows": distributed(whole(5, 2, at=12), rank, ranks, 0),
        "dtensor_columns": distributed(whole(2, 6, dtype=torch.bfloat16, at=13), rank, ranks, 1),
        "dtensor_replicated": distributed(whole(3, at=14), rank, ranks, None),
        "per_rank": sp.PerRank({"losses": [0.5 + rank + seed, 0.25], "cursor": whole(2, at=20 + rank)}),
        "generator": mine,
        "numpy_generator": numbers,
        "objects": blanked(objects()) if blank else objects(),
    }
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    state["rng"] = sp.RandomState()
    return state


def shard(whole: torch.Tensor, rank: int, ranks: int, *, cut: int) -> Any:
    """Rows before `cut` on the first of two ranks, the others on the second; on one rank the whole."""
    if ranks == 1:
        return whole
    mine, start = (whole[:cut], 0) if rank == 0 else (whole[cut:], cut)
    pieces = [(mine.clone(), (start, *[0] * (whole.dim() - 1)))] if len(mine) else []
    return sp.LocalShards(whole.shape, pieces, dtype=whole.dtype)


def flat(whole: torch.Tensor, rank: int, ranks: int, *, cut: int) -> Any:
    """Elements before `cut` in row-major order on the first of two ranks, the others on the second."""
    if ranks == 1:
        return whole
    start, stop = (0, cut) if rank == 0 else (cut, whole.numel())
    return sp.FlatShard(whole.reshape(-1)[start:stop].clone(), whole.shape, start, stop)


def distributed(whole: torch.Tensor, rank: int, ranks: int, dim: int | None) -> Any:
    """A DTensor that is sharded along `dim`, or replicated; on one rank the whole."""
    if ranks == 1:
        return whole
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    local = whole if dim is None else whole.chunk(ranks, dim)[rank].contiguous()
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(
        local.clone(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def objects() -> dict[str, Any]:
    """One plain value of each kind that docs/format.md lists."""
    return {
        "none": None,
        "true": True,
        "int": -(2**63),
        "big_int": -(2**70) - 1,
        "float": 0.1,
        "nan": math.nan,
        "infinite": [math.inf, -math.inf, -0.0],
        "complex": complex(1.5, -math.inf),
        "text": "größer \u2028 \U0001f600 \x00",
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"ab"),
        "long_bytes": bytes(range(100)),
        "tuple": (1, ("a", [2.0]), ()),
        "set": {"b", "a"},
        "frozenset": frozenset({(1, 2), 3}),
        "keyed": {1: "one", (2, "b"): {"$dollar": None}},
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "counter": Counter("abca"),
        "defaultdict": defaultdict(list, {"a": [1]}),
        "scalar": np.float32(0.1),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "long_array": np.arange(40, dtype=np.float64),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "enum": Stage.DECAY,
        "dataclass": Progress(7, 0.5),
        "in_tuple": (torch.arange(3), "beside a tensor"),
        "empty_containers": [{}, [], (), set()],
        "in_one_tuple": (
            OrderedDict([("z", 1), ("a", 2)]),
            Counter("abca"),
            defaultdict(int, {"a": 1}),
            defaultdict(None, {}),
            {"$text": 1},
            np.int64(-3),
            torch.float8_e4m3fn,
            Stage.WARMUP,
            Progress(1, math.inf),
        ),
    }


def blanked(value: Any) -> Any:
    """The same structure, with values that a load replaces."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        made = value.copy()
        made.update({key: blanked(item) for key, item in value.items()})
        return made
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if type(value) is tuple and any(isinstance(item, torch.Tensor) for item in value):
        return tuple(map(blanked, value))
    return -1


def chain(step: int, rank: int, ranks: int, *, blank: bool = False) -> dict[str, Any]:
    """A state of which each step changes a part: `moving` in every step, `sometimes` in every third."""
    seed = 99 if blank else 0
    return {
        "frozen": shard(pattern(torch.float32, 6, 4, seed=1 + seed), rank, ranks, cut=4),
        "frozen_half": pattern(torch.bfloat16, 9, seed=2 + seed),
        "moving": shard(pattern(torch.float32, 4, 4, seed=3 + step + seed), rank, ranks, cut=1),
        "sometimes": pattern(torch.int64, 5, seed=40 + step // 3 + seed),
        "epoch": -1 if blank else step,
        "history": [] if blank else [0.5 * number for number in range(step)],
    }


def blocks(*, blank: bool = False) -> dict[str, Any]:
    """Chunks of several blocks of 262,144 bytes, and plain values that are stored as tensors."""
    seed = 7 if blank else 0
    return {
        "two_blocks": pattern(torch.float32, 270, 256, seed=seed),
        "exactly_one_block": pattern(torch.uint8, 262_144, seed=1 + seed),
        "three_blocks": pattern(torch.uint8, 524_289, seed=2 + seed),
        "small": pattern(torch.int8, 3, seed=3 + seed),
        "text": "" if blank else "long text " * 7000,
        "ints": [] if blank else list(range(1200)),
        "floats": [] if blank else [number / 8 for number in range(1200)],
    }


def machine(**options: Any) -> rerun.RerunMachine:
    """A rerun machine on a device that does not depend on the computer."""
    return rerun.RerunMachine(identity=rerun.DeviceIdentity("golden"), layout="golden", **options)


def run_step(of: rerun.RerunMachine, *, fault: bool) -> rerun.Decision:
    """One step of training, in which a fault is a loss that is not a number."""
    data = rerun.ReplayableIterator([torch.full((4,), 1.0)])
    while of.should_run(data):
        next(data)
        of.validate(math.nan if fault else 1.0, math.isnan, message="loss")
    return of.decide()


class Net(nn.Module):
    """A model of a few parameters, one of them tied, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 3)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(tokens))
        return self.head(hidden).square().mean() + self.up(hidden).square().mean()  # type: ignore[no-any-return]


class TensorParallel(nn.Module):
    """Fused and padded weights, of which each of two ranks holds its part, with declared layouts."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.attention = nn.Linear(3, 16 // ranks, bias=False)  # 4 heads of queries, 2 groups, 2 elements
        self.gated = nn.Linear(3, 8 // ranks)
        self.vocabulary = nn.Embedding(8 // ranks, 3)  # 7 tokens and one row of padding
        layouts.query_key_value(
            self.attention, "weight", heads=4, groups=2, head_dim=2, rank=rank, ranks=ranks
        )
        layouts.swiglu(self.gated, "weight", 4, rank=rank, ranks=ranks)
        layouts.swiglu(self.gated, "bias", 4, rank=rank, ranks=ranks)
        layouts.vocabulary(self.vocabulary, "weight", 7, rank=rank, ranks=ranks)

    def fill(self, rank: int, ranks: int, seed: int) -> None:
        """Sets values by their place in the whole model."""

        def part(whole: torch.Tensor, *sizes: int) -> torch.Tensor:
            return torch.cat([block.chunk(ranks)[rank] for block in whole.split(sizes)])

        with torch.no_grad():
            self.attention.weight.copy_(part(pattern(torch.float32, 16, 3, seed=seed), 8, 4, 4))
            self.gated.weight.copy_(part(pattern(torch.float32, 8, 3, seed=seed + 1), 4, 4))
            self.gated.bias.copy_(part(pattern(torch.float32, 8, seed=seed + 2), 4, 4))
            self.vocabulary.weight.copy_(part(pattern(torch.float32, 8, 3, seed=seed + 3), 8))


def training(rank: int, ranks: int, *, blank: bool = False) -> dict[str, Any]:
    """Modules, optimizers and a schedule; of two ranks with the distributed optimizer."""
    from shardproof.optim import DistributedOptimizer

    torch.manual_seed(9 if blank else 1)
    model = Net()
    groups = [
        {"params": [model.table.weight], "weight_decay": 0.1},
        {"params": [*model.norm.parameters(), *model.up.parameters()], "lr": 0.5 if blank else 0.02},
    ]
    optimizer: Any = (
        torch.optim.AdamW(groups, lr=0.5 if blank else 0.01)
        if ranks == 1
        else DistributedOptimizer(model, torch.optim.AdamW, lr=0.01, bucket_bytes=128)
    )
    parallel = TensorParallel(rank, ranks)
    parallel.fill(rank, ranks, 50 if blank else 0)
    rate = torch.tensor(0.5 if blank else 0.25)
    momentum = torch.optim.SGD(parallel.parameters(), lr=rate, momentum=0.9, dampening=0.5 if blank else 0.0)
    schedule = torch.optim.lr_scheduler.StepLR(momentum, step_size=2, gamma=0.5)
    if not blank:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([0, 1, 2, 3, 5])).backward()
            optimizer.step()
            for parameter in parallel.parameters():
                parameter.grad = torch.ones_like(parameter)
            momentum.step()
            schedule.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "parallel": parallel,
        "momentum": sp.OptimizerState(momentum, parallel),
        "schedule": schedule,
    }


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(data: bytes) -> str:
    """The digest of the format: XXH3 with 128 bits."""
    return xxhash.xxh3_128_hexdigest(data)


def spelled(value: Any) -> str:
    """A value as text that two values share only if they are the same, with their types."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)} {digest(raw(value))}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {digest(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, np.generic):
        return f"{kind} {value.tobytes().hex()}"
    if isinstance(value, dict):
        items = [f"{spelled(key)}: {spelled(item)}" for key, item in value.items()]
        items = items if isinstance(value, OrderedDict) else sorted(items)
        made = f" of {value.default_factory!r}" if isinstance(value, defaultdict) else ""
        return f"{kind}{made} {{{', '.join(items)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{kind} {{{', '.join(sorted(map(spelled, value)))}}}"
    if isinstance(value, (list, tuple)) and kind in ("list", "tuple"):
        return _short(f"{kind} [{', '.join(map(spelled, value))}]")
    return _short(repr(value))


def _short(text: str) -> str:
    """The digest of a long text in place of the text."""
    return text if len(text) < 400 else f"{text[:40]} and so on, {len(text)} in all: {digest(text.encode())}"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and text of everything in a state of one rank."""
    if isinstance(tree, sp.PerRank):
        yield from leaves(tree.value, path)
    elif isinstance(tree, sp.OptimizerState):
        yield from leaves(tree.optimizer, path)
    elif isinstance(tree, torch.Generator):
        yield path, spelled(tree.get_state())
    elif isinstance(tree, np.random.Generator):
        yield path, spelled(tree.bit_generator.state)
    elif hasattr(tree, "state_dict"):
        yield from leaves(tree.state_dict(), path)
    elif type(tree) in (dict, list, OrderedDict):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, spelled(tree)
