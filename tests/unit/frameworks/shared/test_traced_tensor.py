"""A traced conversion moves the elements that the conversion moves, to and from any local pieces."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.frameworks.shared.traced_tensor import TracedTensor, inverse, local_parts

Tensors = dict[str, Any]


def join_experts(files: Tensors) -> Tensors:
    """As Mixtral: gate and up projection of each expert to one tensor."""
    gates, ups = ([files[f"{name}{expert}"] for expert in range(3)] for name in ("gate", "up"))
    return {"joined": torch.cat([torch.stack(gates, dim=0), torch.stack(ups, dim=0)], dim=1)}


def split_and_transpose(files: Tensors) -> Tensors:
    query, key = torch.split(files["qkv"], [4, 2], dim=0)
    first, second = torch.chunk(torch.transpose(key, 0, 1), 2, dim=-1)
    return {"query": torch.unsqueeze(query, 1), "first": first.squeeze(1).contiguous(), "second": second}


EXPERTS = {f"{name}{expert}": (4, 5) for name in ("gate", "up") for expert in range(3)}
CASES = [(join_experts, EXPERTS), (split_and_transpose, {"qkv": (6, 3)})]


def cut(tensor: torch.Tensor, seed: int) -> sp.LocalShards:
    """The tensor as two to four local pieces, which are views of it."""
    choose = random.Random(seed)
    pieces = [(tensor, (0,) * tensor.dim())]
    for axis in range(min(tensor.dim(), 2)):
        at = choose.randrange(tensor.shape[axis] + 1)
        for view, offsets in pieces[:]:
            pieces.remove((view, offsets))
            moved = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
            size = tensor.shape[axis]
            pieces += [(view.narrow(axis, 0, at), offsets), (view.narrow(axis, at, size - at), moved)]
    return sp.LocalShards(tensor.shape, pieces)


def inside(offsets: tuple[int, ...], view: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, view.shape, strict=True))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("convert", "shapes"), CASES)
def test_a_traced_conversion_fills_what_the_conversion_gives(
    convert: Callable[[Tensors], Tensors], shapes: dict[str, tuple[int, ...]], seed: int
) -> None:
    files = {key: torch.randn(shape) for key, shape in shapes.items()}
    expected = convert(files)
    traced = convert({key: TracedTensor.of(key, shape) for key, shape in shapes.items()})
    for name, whole in expected.items():
        assert traced[name].shape == tuple(whole.shape)
        live = torch.zeros_like(whole)
        for box in traced[name].boxes:
            for view, offsets in local_parts(box, cut(live, seed)):
                view.copy_(files[box.source][inside(offsets, view)])
        assert torch.equal(live, whole)


@pytest.mark.parametrize("seed", range(5))
def test_the_inverse_of_a_box_maps_back(seed: int) -> None:
    live = torch.randn(3, 8, 5)
    joined = TracedTensor.of("joined", live.shape)
    for half, name in enumerate(("gate", "up")):
        part = torch.chunk(joined, 2, dim=1)[half]
        for expert in range(3):
            stored = torch.chunk(part, 3, dim=0)[expert].squeeze(0)
            found = torch.zeros(stored.shape)
            for box in stored.boxes:
                for view, offsets in local_parts(inverse(name, box), cut(live, seed)):
                    found[inside(offsets, view)] = view
            assert torch.equal(found, live[expert, 4 * half : 4 * half + 4])


def test_an_operation_that_does_not_move_boxes_is_refused_by_name() -> None:
    with pytest.raises(sp.StructureError, match="relu"):
        torch.relu(TracedTensor.of("weight", (2, 3)))  # type: ignore[arg-type]
    with pytest.raises(sp.StructureError, match="to join along axis 1"):
        torch.cat([TracedTensor.of("a", (2, 3)), TracedTensor.of("b", (4, 3))], dim=1)  # type: ignore[list-item]
