"""After any change of the state, a walk that reuses the last one collects the same as a first walk."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.engine.planning import Structure
from shardproof.engine.state.dtensor import LOCAL
from shardproof.engine.state.tensors import memory_identity
from shardproof.errors import StructureError
from shardproof.geometry import Boxes, IndexMap
from shardproof.state import Collected, LastWalk, LocalShards, collect
from tests.describing import watch_described

Tree = dict[str, Any]


@contextmanager
def second_of_two() -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    """Joins a world of two ranks as rank 1; yields two meshes that list the ranks in different orders."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        yield DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
    finally:
        dist.destroy_process_group()


def placed(mesh: DeviceMesh, rows: int, placement: Placement) -> DTensor:
    """A DTensor of which this rank holds `rows` of 3 elements."""
    count = 2 * rows if placement.is_shard(0) else rows
    width = 6 if placement.is_shard(1) else 3
    return DTensor.from_local(
        torch.rand(rows, 3), mesh, [placement], run_check=False, shape=(count, width), stride=(width, 1)
    )


def uneven(tensor: DTensor, split: int) -> DTensor:
    """Maps the first `split` rows to the first global rows, and the other rows to the rows from 5 on."""
    rows = len(getattr(tensor, "_local_tensor", tensor))
    local = Boxes(np.array([[0, 0], [split, 0]]), np.array([[split, 3], [rows - split, 3]]))
    setattr(tensor, LOCAL, IndexMap((rows, 3), (max(2 * rows, 8), 3), local, np.array([[0, 0], [5, 0]])))
    return tensor


class Order(NamedTuple):
    """Torch's record of the mesh dimensions that shard a tensor dimension, in order."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


def ordered(tensor: DTensor, *mesh_dims: int) -> DTensor:
    """Sets the order in which mesh dimensions shard the rows."""
    tensor._spec.shard_order = (Order(0, mesh_dims),)
    return tensor


def twice_sharded() -> DTensor:
    """A DTensor whose rows are sharded over two mesh dimensions, one of size 1."""
    mesh, placements = DeviceMesh("cpu", [[0, 1]]), [Shard(0), Shard(0)]
    tensor = DTensor.from_local(
        torch.rand(5, 3), mesh, placements, run_check=False, shape=(10, 3), stride=(3, 1)
    )
    return ordered(tensor, 0, 1)


class Marked(torch.Tensor):
    """A subclass of tensor."""


class Trained(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(placed(mesh, 4, Shard(0)))
        self.bias = torch.nn.Parameter(torch.rand(3))


def state(mesh: DeviceMesh) -> Tree:
    """A tree with one value of each kind that a walk distinguishes."""
    module = Trained(mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    whole = torch.rand(4, 3)
    return {
        "module": module,
        "optimizer": optimizer,
        "plain": whole,
        "tied": whole,
        "view": torch.rand(6)[2:],
        "scalar": torch.tensor(3.0),
        "complex": torch.rand(4, dtype=torch.complex64),
        "empty": torch.zeros(0, 3),
        "sharded": placed(mesh, 5, Shard(0)),
        "uneven": uneven(placed(mesh, 4, Shard(0)), 1),
        "ordered": twice_sharded(),
        "array": torch.rand(30).numpy(),
        "epoch": 3,
    }


def respecced(tree: Tree, mesh: DeviceMesh, placement: Placement) -> None:
    """Gives the DTensor another spec; its local tensor stays."""
    tree["sharded"]._spec = placed(mesh, 5, placement)._spec


def turned(mesh: DeviceMesh) -> None:
    """Moves this rank to the other coordinate of the mesh."""
    mesh._coordinate_on_dim = [1 - place for place in mesh.get_coordinate() or ()]


def move(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Changes the mesh in the spec of a DTensor."""
    if isinstance(tensor, DTensor):
        tensor._spec.mesh = mesh


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


CHANGES: dict[str, Callable[[Tree, DeviceMesh, DeviceMesh], Any]] = {
    "nothing": lambda tree, mesh, other: None,
    "values": lambda tree, mesh, other: tree["plain"].add_(1),
    "other tensors of the same kind": lambda tree, mesh, other: tree.update(
        plain=torch.rand(4, 3), tied=torch.rand(4, 3), view=torch.rand(4), scalar=torch.tensor(5.0)
    ),
    "another DTensor of the same kind": lambda tree, mesh, other: tree.update(
        sharded=placed(mesh, 5, Shard(0))
    ),
    "tied": lambda tree, mesh, other: tree.update(tied=tree["plain"]),
    "untied": lambda tree, mesh, other: tree.update(tied=tree["plain"].clone()),
    "tied the other way": lambda tree, mesh, other: tree.update(
        tied=torch.rand(4, 3), view=tree["scalar"].reshape(1), scalar=tree["scalar"]
    ),
    "another shape": lambda tree, mesh, other: set_data(tree["plain"], torch.rand(2, 3)),
    "the same elements in another order": lambda tree, mesh, other: set_data(
        tree["plain"], torch.rand(3, 4).t()
    ),
    "another dtype": lambda tree, mesh, other: tree.update(view=tree["view"].double()),
    "another dtype of as many bytes": lambda tree, mesh, other: set_data(
        tree["scalar"], torch.tensor(3, dtype=torch.int32)
    ),
    "conjugate": lambda tree, mesh, other: set_data(tree["complex"], tree["complex"].conj()),
    "negative": lambda tree, mesh, other: tree.update(view=tree["complex"].conj().imag),
    "resized": lambda tree, mesh, other: tree["empty"].resize_(2, 3),
    "emptied": lambda tree, mesh, other: tree["empty"].resize_(0, 3),
    "an empty tensor tied": lambda tree, mesh, other: tree.update(more=tree["empty"]),
    "a key more": lambda tree, mesh, other: tree.update(more=torch.rand(2)),
    "a key less": lambda tree, mesh, other: tree.pop("more", None),
    "keys in another order": lambda tree, mesh, other: tree.update(plain=tree.pop("plain")),
    "an object more": lambda tree, mesh, other: tree.update(note="x"),
    "a plain tensor for a DTensor": lambda tree, mesh, other: tree.update(sharded=torch.rand(8, 3)),
    "a DTensor for a plain tensor": lambda tree, mesh, other: tree.update(
        plain=placed(mesh, 4, Shard(0)), sharded=placed(mesh, 5, Shard(0))
    ),
    "replicated": lambda tree, mesh, other: tree.update(sharded=placed(mesh, 5, Replicate())),
    "placed by columns": lambda tree, mesh, other: tree.update(sharded=placed(mesh, 5, Shard(1))),
    "another mesh": lambda tree, mesh, other: tree.update(sharded=placed(other, 5, Shard(0))),
    "another shape of a DTensor": lambda tree, mesh, other: set_data(tree["sharded"], torch.rand(2, 3)),
    "another spec": lambda tree, mesh, other: respecced(tree, mesh, Replicate()),
    "another mesh in the spec": lambda tree, mesh, other: respecced(tree, other, Shard(0)),
    "another mesh in the same spec": lambda tree, mesh, other: move(tree["sharded"], other),
    "another order of shards": lambda tree, mesh, other: ordered(tree["ordered"], 1, 0),
    "the usual order of shards": lambda tree, mesh, other: ordered(tree["ordered"], 0, 1),
    "another place in the mesh": lambda tree, mesh, other: turned(mesh),
    "a marked tensor in a DTensor": lambda tree, mesh, other: setattr(
        tree["sharded"], "_local_tensor", torch.rand(5, 3).as_subclass(Marked)
    ),
    "pieces": lambda tree, mesh, other: tree.update(
        explicit=LocalShards((4, 3), [(torch.rand(2, 3), (2, 0))])
    ),
    "other pieces": lambda tree, mesh, other: tree.update(
        explicit=LocalShards((4, 3), [(torch.rand(2, 3), (1, 0))])
    ),
    "other memory of a DTensor": lambda tree, mesh, other: setattr(
        tree["sharded"], "_local_tensor", torch.rand(5, 3)
    ),
    "other rows of a DTensor": lambda tree, mesh, other: setattr(
        tree["sharded"], "_local_tensor", torch.rand(3, 3)
    ),
    "another embedding": lambda tree, mesh, other: uneven(tree["uneven"], 3),
    "an embedding": lambda tree, mesh, other: uneven(tree["sharded"], 2),
    "no embedding": lambda tree, mesh, other: tree["uneven"].__dict__.pop(LOCAL, None),
    "a slot more": lambda tree, mesh, other: (
        tree["optimizer"].state[tree["module"].bias].update(more=torch.rand(3))
    ),
    "another option": lambda tree, mesh, other: tree["optimizer"].param_groups[0].update(lr=0.2),
    "a parameter's memory": lambda tree, mesh, other: set_data(tree["module"].bias, torch.rand(3)),
    "sparse": lambda tree, mesh, other: tree.update(view=torch.eye(3).to_sparse()),
    "meta": lambda tree, mesh, other: tree.update(view=torch.rand(4, device="meta")),
    "nested": lambda tree, mesh, other: tree.update(
        view=torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.strided)
    ),
    "dense": lambda tree, mesh, other: tree.update(view=torch.rand(4)),
}


def contents_of(collected: Collected) -> list[Any]:
    """All that was collected, with the identity of each view's memory."""
    return [
        [
            (
                entry.key,
                entry.dtype,
                entry.shape,
                entry.alias_of,
                [
                    (piece.offsets, piece.sizes, piece.address, piece.is_plain, memory_identity(piece.view))
                    for piece in entry.pieces
                ],
            )
            for entry in collected.tensors
            if not entry.key.startswith("array")  # torch copies an array that it cannot share
        ],
        collected.objects,
        [(item.optimizer, item.memory) for item in collected.stepped],
    ]


def boxes(collected: Collected) -> list[Any]:
    structure = Structure.of(collected)
    return [
        structure.tensors(),
        *(column.tolist() for column in (structure.box_tensor, structure.box_offsets, structure.box_sizes)),
    ]


def outcome(tree: Tree, last: LastWalk | None) -> tuple[Any, Collected | None]:
    try:
        collected = collect(tree, last=last)
    except StructureError as error:
        return str(error), None
    return contents_of(collected), collected


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: str) -> None:
    check([change])


def test_pieces_that_change_are_seen() -> None:
    check(["pieces", "other pieces"])


@given(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=12))
def test_a_walk_that_reuses_the_last_one_collects_the_same_as_a_first_walk(changes: list[str]) -> None:
    check(changes)


def check(changes: list[str]) -> None:
    with second_of_two() as (mesh, other):
        tree, last = state(mesh), LastWalk()
        _, before = outcome(tree, last)
        for change in changes:
            CHANGES[change](tree, mesh, other)
            expected, _ = outcome(tree, None)
            found, collected = outcome(tree, last)
            assert found == expected, change
            if collected is not None and before is not None and collected.token is before.token:
                assert boxes(collected) == boxes(before)
            before = collected or before


@pytest.mark.parametrize(
    "change",
    ["nothing", "values", "other tensors of the same kind", "a parameter's memory", "another option"],
)
def test_unchanged_tensors_are_not_described_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = watch_described(monkeypatch)
    with second_of_two() as (mesh, other):
        tree, last = state(mesh), LastWalk()
        tree["tied"] = tree["tied"].clone()
        before = collect(tree, last=last)
        assert len(described) == len(before.tensors)
        described.clear()
        CHANGES[change](tree, mesh, other)
        after = collect(tree, last=last)
    assert described == ["empty", "uneven"], "these have no piece, or several"
    assert after.token is before.token


def test_the_last_walk_holds_no_memory_of_tensors() -> None:
    array = np.zeros(1000)
    freed = weakref.ref(array)
    last = LastWalk()
    for _ in range(2):
        collect({"w": torch.from_numpy(array), "n": torch.ones(2)}, last=last)
    del array
    gc.collect()
    assert freed() is None


def test_a_walk_after_a_failed_walk_describes_every_tensor() -> None:
    last, tree = LastWalk(), {"w": torch.ones(2), "n": torch.ones(3)}
    before = collect(tree, last=last)
    with pytest.raises(StructureError, match="meta"):
        collect(tree | {"n": torch.ones(3, device="meta")}, last=last)
    assert contents_of(collect(tree, last=last)) == contents_of(before)
