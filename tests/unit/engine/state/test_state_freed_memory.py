"""Tensors whose elements are not in memory are refused with their key, before anything is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardproof as sp
from shardproof.errors import ShardproofError, StructureError
from shardproof.state import (
    Catalogue,
    FlatShard,
    LastWalk,
    Layout,
    LocalShards,
    OptimizerState,
    bind,
    collect,
    declare,
)


def cut(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    """The tensor, with only the first bytes of its storage left."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def whole() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4)


WITHOUT_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "freed": lambda: cut(whole()),
    "cut by a byte": lambda: cut(whole(), 47),
    "a view of a freed storage": lambda: cut(torch.zeros(4, 4)[1:]),
    "a view beyond a cut storage": lambda: cut(torch.zeros(4, 4)[1:], 63),
    "a strided view beyond a cut storage": lambda: cut(torch.zeros(4, 3).t(), 44),
    "an expanded view of a freed storage": lambda: cut(torch.zeros(1, 4).expand(3, 4)),
    "zeros that are stored nowhere": lambda: torch._efficientzerotensor((3, 4)),
    "a view of zeros that are stored nowhere": lambda: torch._efficientzerotensor((4, 4))[1:],
    "functional": lambda: torch._to_functional_tensor(whole()),
    "on the meta device": lambda: whole().to("meta"),
    "a view on the meta device": lambda: torch.zeros(4, 4, device="meta")[1:],
}


@contextmanager
def alone() -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


def placed(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    shape, stride = local.shape, (4, 1)
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=shape, stride=stride)


def refused(key: str, act: Callable[[], Any]) -> str:
    with pytest.raises(StructureError) as caught:
        act()
    assert caught.value.details["key"] == key
    return str(caught.value)


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_tensor_without_memory_is_neither_saved_nor_filled(kind: str) -> None:
    tensor = WITHOUT_MEMORY[kind]()
    catalogue = Catalogue({"model.w": ("float32", (3, 4))}, {}, {}, 1)
    tree = {"model": {"w": tensor}}
    refused("model.w", lambda: collect(tree))
    refused("model.w", lambda: bind(tree, catalogue))


@pytest.mark.parametrize("kind", ["freed", "cut by a byte", "zeros that are stored nowhere"])
def test_the_local_tensor_of_a_dtensor_is_checked(kind: str) -> None:
    with alone() as mesh:
        tree = {"w": placed(WITHOUT_MEMORY[kind](), mesh)}
        refused("w", lambda: collect(tree))
        refused("w", lambda: bind(tree, Catalogue({"w": ("float32", (3, 4))}, {}, {}, 1)))


def flat(nbytes: int) -> torch.Tensor:
    return cut(torch.zeros(12), nbytes)


def test_pieces_and_flat_shards_without_memory_are_refused() -> None:
    catalogue = Catalogue({"w": ("float32", (3, 4))}, {}, {}, 1)
    for value in (
        LocalShards((3, 4), [(cut(whole()), (0, 0))]),
        LocalShards((3, 4), [(whole()[:1], (0, 0)), (cut(torch.zeros(2, 4), 31), (1, 0))]),
        FlatShard(flat(0), (3, 4), 0, 12),
        FlatShard(flat(47), (3, 4), 0, 12),
    ):
        refused("w", lambda value=value: collect({"w": value}))
        refused("w", lambda value=value: bind({"w": value}, catalogue))


def test_a_tensor_with_a_declared_layout_is_refused() -> None:
    module = torch.nn.Linear(4, 3, bias=False)
    declare(module, "weight", Layout.whole((3, 4)).expert(0, 2))
    cut(module.weight.data, 47)
    refused("weight", lambda: collect(module))
    refused("weight", lambda: bind(module, Catalogue({"weight": ("float32", (2, 3, 4))}, {}, {}, 1)))


class MadeUp(torch.nn.Linear):
    """Its state dict is not its memory."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"weight": cut(whole())}


def test_a_tensor_that_a_module_makes_up_is_refused() -> None:
    module = MadeUp(4, 3, bias=False)
    declare(module, "weight", Layout.whole((3, 4)))
    refused("weight", lambda: collect(module))
    refused("weight", lambda: bind(module, Catalogue({"weight": ("float32", (3, 4))}, {}, {}, 1)))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1), foreach=False)
    optimizer.state[module.weight] = {"step": torch.tensor(1.0), "exp_avg": whole(), "note": whole()}
    return module, optimizer


@pytest.mark.parametrize("slot", ["step", "exp_avg"])
@pytest.mark.parametrize("laid_out", [False, True])
def test_slots_without_memory_are_refused(slot: str, laid_out: bool, tmp_path: Path) -> None:
    module, optimizer = trained()
    if laid_out:
        declare(module, "weight", Layout.whole((3, 4)).expert(0, 1))
    tree = {"optimizer": OptimizerState(optimizer, module)}
    sp.save(tmp_path / "whole", tree)
    cut(optimizer.state[module.weight][slot])
    refused(f"optimizer.weight.{slot}", lambda: collect(tree))
    refused(f"optimizer.weight.{slot}", lambda: sp.load(tmp_path / "whole", tree))


def test_options_without_memory_are_refused(tmp_path: Path) -> None:
    module, optimizer = trained()
    tree = {"optimizer": OptimizerState(optimizer, module)}
    sp.save(tmp_path / "whole", tree)
    optimizer.param_groups[0]["lr"] = cut(torch.tensor(0.1))
    refused("optimizer.@options.lr", lambda: collect(tree))
    refused("optimizer.@options.lr", lambda: sp.load(tmp_path / "whole", tree))


def test_a_tensor_in_plain_data_is_refused() -> None:
    class Averages:
        def state_dict(self) -> dict[str, Any]:
            return {"mean": cut(torch.zeros(1000), 8)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    refused("averages.mean", lambda: collect({"averages": Averages()}))


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_tensors_inside_of_a_transformation_are_refused(transform: Any) -> None:
    def saves(x: torch.Tensor) -> torch.Tensor:
        catalogue = Catalogue({"x": ("float32", (3,))}, {}, {}, 1)
        assert "torch.func" in refused("x", lambda: collect({"x": x}))
        assert "torch.func" in refused("x", lambda: bind({"x": x}, catalogue))
        return x

    transform(saves)(torch.ones(3) if transform is not torch.vmap else torch.ones(2, 3))


def test_a_tensor_that_loses_its_memory_between_two_walks_is_refused() -> None:
    last = LastWalk()
    state = {"a": torch.ones(3), "w": whole(), "t": whole().t()}
    before = collect(state, last=last)
    for key, nbytes in (("w", 0), ("w", 47), ("t", 47)):
        nbytes_before = state[key].untyped_storage().nbytes()
        cut(state[key], nbytes)
        refused(key, lambda: collect(state, last=last))
        cut(state[key], nbytes_before)
        assert collect(state, last=last).token is before.token
    state["w"] = torch._efficientzerotensor((4, 4))[1:]
    refused("w", lambda: collect(state, last=last))
    state["w"] = torch.zeros(4, 4)[1:]
    assert collect(state, last=last).token is before.token


def test_oversized_storages_and_empty_tensors_are_accepted() -> None:
    state = {
        "grown": cut(torch.ones(3), 1000),
        "empty": cut(torch.ones(0, 3)),
        "an empty view": cut(torch.ones(4)[4:]),
        "expanded": torch.ones(1).expand(5),
        "a view": torch.zeros(10)[7:],
        "a strided view": torch.zeros(3, 4)[:, 3],
        "an array": np.zeros((3, 4))[::-1],
    }
    keys = {entry.key: len(entry.pieces) for entry in collect(state).tensors}
    assert keys == {key: 0 if "empty" in key else 1 for key in state}


def shifted(dtype: torch.dtype, shift: int) -> torch.Tensor:
    """Twelve elements that begin `shift` bytes after a multiple of 64."""
    memory = torch.zeros(12 * dtype.itemsize + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + shift
    return torch.frombuffer(memory.numpy(), dtype=dtype, offset=start, count=12).view(3, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("turned", [False, True])
def test_a_misaligned_tensor_is_refused(dtype: torch.dtype, turned: bool) -> None:
    name = str(dtype).removeprefix("torch.")
    catalogue = Catalogue({"w": (name, (4, 3) if turned else (3, 4))}, {}, {}, 1)
    for shift in (1, dtype.itemsize // 2, dtype.itemsize, 3 * dtype.itemsize):
        value = shifted(dtype, shift)
        state = {"w": value.t() if turned else value}
        if shift % dtype.itemsize:
            refused("w", lambda state=state: collect(state))
            refused("w", lambda state=state: bind(state, catalogue))
        else:
            assert collect(state).tensors[0].pieces and bind(state, catalogue).tensors


def test_misaligned_arrays_are_saved_and_filled(tmp_path: Path) -> None:
    def array() -> Any:
        return np.frombuffer(bytearray(8 * 1000 + 1), np.float64, 1000, 1)

    source, target = array(), array()
    source[:] = np.arange(1000)
    sp.save(tmp_path / "step", {"a": source, "b": source[::2]})
    sp.load(tmp_path / "step", {"a": target, "b": np.zeros(500)})
    assert not target.flags.aligned and np.array_equal(source, target)


@pytest.mark.parametrize("kind", ["freed", "cut by a byte", "zeros that are stored nowhere"])
def test_a_refused_load_touches_nothing_and_a_refused_save_writes_nothing(kind: str, tmp_path: Path) -> None:
    sp.save(tmp_path / "whole", {"a": torch.ones(3), "w": whole(), "z": 1})
    target = {"a": torch.zeros(3), "w": WITHOUT_MEMORY[kind](), "z": 0}
    with pytest.raises(ShardproofError, match="w: the tensor"):
        sp.load(tmp_path / "whole", target)
    assert target["a"].tolist() == [0, 0, 0] and target["z"] == 0
    with pytest.raises(ShardproofError, match="w: the tensor"):
        sp.save(tmp_path / "new", target)
    assert not (tmp_path / "new" / "manifest.json").exists()
