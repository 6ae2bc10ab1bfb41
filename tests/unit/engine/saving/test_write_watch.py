"""Which tensors a save may read live, and how it detects writes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardproof.engine.saving.write_watch import MemorySample, WriteWatch
from shardproof.state import Piece, collect, declare_storage_owner


def watch_of(state: Any) -> tuple[WriteWatch, list[str]]:
    """The watch over a state, and the keys of its pieces."""
    collected = collect(state)
    pieces = [(piece, entry.key) for entry in collected.tensors for piece in entry.pieces]
    return WriteWatch([piece for piece, _ in pieces], collected.stepped), [key for _, key in pieces]


def fenced(state: Any) -> list[str]:
    """The keys of tensors that may be read live."""
    watch, keys = watch_of(state)
    return [key for row, key in enumerate(keys) if watch.is_fenced(row)]


def changed(state: Any, write: Callable[[], object]) -> str | None:
    """The key that the watch reports after `write`."""
    watch, keys = watch_of(state)
    assert watch.changed_piece({}) is None
    with torch.no_grad():
        write()
    row = watch.changed_piece({})
    return None if row is None else keys[row]


def dtensor(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def test_steps_that_are_replayed_and_tensors_without_a_version_are_not_fenced() -> None:
    net = nn.Linear(4, 4)
    with torch.inference_mode():
        frozen = nn.Linear(4, 4)
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    replayed = torch.optim.Adam(net.parameters(), capturable=True)
    frozen_step = torch.optim.SGD(frozen.parameters(), lr=1.0)
    assert fenced({"model": net, "optimizer": plain}) == ["model.bias", "model.weight"]
    assert fenced({"model": net, "optimizer": replayed}) == []
    assert fenced({"model": frozen, "optimizer": frozen_step}) == []


def test_only_what_a_hooked_step_writes_is_fenced() -> None:
    net, other = nn.BatchNorm1d(4), nn.Linear(4, 4)
    with torch.inference_mode():
        frozen = nn.Linear(4, 4)
    state: dict[str, Any] = {"net": net, "frozen": frozen, "other": other, "average": torch.ones(4)}
    replayed = {"replayed": torch.optim.Adam(other.parameters(), capturable=True)}
    state |= replayed
    state["plain"] = torch.optim.SGD(net.parameters(), lr=1.0)
    state["frozen step"] = torch.optim.SGD(frozen.parameters(), lr=1.0)
    assert fenced(state) == ["net.bias", "net.weight"]
    assert watch_of(state)[0]
    assert not watch_of({"other": other} | replayed)[0]


def test_a_part_of_a_storage_is_fenced_only_where_the_owner_is_declared() -> None:
    flat = torch.zeros(8)
    net = nn.ParameterDict({"first": torch.ones(4), "second": torch.ones(2)})
    net["first"].data, net["second"].data = flat[:4], flat[4:6]
    state = {"net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0)}
    assert fenced(state) == []
    declare_storage_owner(net["first"], flat)
    assert fenced(state) == ["net.first", "net.second"]
    assert changed(state, lambda: flat.add_(0)) == "net.first"
    assert changed(state, lambda: net["second"].add_(1)) == "net.second"
    net["first"].data = torch.ones(4)  # the owner that was declared has other memory
    assert fenced(state) == ["net.first"]
    declare_storage_owner(net["second"], flat[:6])  # which is not all of it
    assert fenced(state) == ["net.first"]


def test_a_second_tensor_with_the_memory_of_a_parameter_is_fenced_with_it() -> None:
    net = nn.Linear(4, 1, bias=False)
    alias = net.weight.data  # has a version counter of its own
    state = {"net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0), "alias": alias}
    assert fenced(state) == ["alias", "net.weight"]
    assert changed(state, lambda: net.weight.add_(0)) is not None
    assert changed(state, lambda: alias.add_(0)) == "alias"


@pytest.mark.parametrize(
    "give",
    [
        lambda weight: weight.detach().numpy(),
        lambda weight: weight.share_memory_(),
        lambda weight: setattr(weight, "data", torch.from_numpy(np.ones((4, 4), np.float32))),
        lambda weight: setattr(
            weight, "data", torch.frombuffer(bytearray(64), dtype=torch.float32).view(4, 4)
        ),
        lambda weight: setattr(weight, "data", torch.from_dlpack(np.ones((4, 4), np.float32))),
    ],
    ids=["numpy array over it", "shared with processes", "over numpy", "over a buffer", "of another library"],
)
def test_memory_that_code_outside_torch_may_write_is_not_fenced(give: Callable[[torch.Tensor], Any]) -> None:
    net = nn.Linear(4, 4)
    state = {"net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0)}
    held = give(net.weight)
    assert fenced(state) == ["net.bias"]
    del held


def test_a_write_through_any_dtensor_of_shared_memory_is_detected(mesh: DeviceMesh) -> None:
    """A write to a DTensor raises only its own version, so the watch reads the version of each."""
    local = torch.zeros(8)
    first, second = (nn.Parameter(dtensor(part, mesh)) for part in (local[:4], local[4:]))
    apart = nn.Parameter(torch.zeros(2))
    net = nn.ParameterDict({"first": first, "second": second, "apart": apart})
    state = {"net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0)}
    declare_storage_owner(first, local)
    assert fenced(state) == ["net.apart", "net.first", "net.second"]
    for parameter in (first, second):
        assert changed(state, lambda: parameter.add_(0)) == "net.first"  # noqa: B023
    assert changed(state, lambda: apart.add_(0)) == "net.apart"


def test_padded_buffers_of_fully_shard_are_known(process_group: None) -> None:
    net = nn.Linear(4, 3)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    state = {"net": net, "step": optimizer}
    assert fenced(state) == ["net.bias", "net.weight"]
    parameters = net._get_fsdp_state()._fsdp_param_group.fsdp_params
    for parameter, rows in zip(parameters, (3, 3), strict=True):  # as on a rank that has padding
        padded = torch.zeros(rows + 1, *parameter.sharded_param.shape[1:])
        parameter.sharded_param._local_tensor = padded[:rows]
        parameter._sharded_param_data = padded.view(-1)
    assert fenced(state) == ["net.bias", "net.weight"]
    assert changed(state, lambda: parameters[0]._sharded_param_data.add_(0)) == "net.weight"


def test_memory_shared_with_a_dtensor_without_a_version_is_not_fenced(mesh: DeviceMesh) -> None:
    local = torch.zeros(4)
    with torch.inference_mode():
        frozen = nn.Parameter(dtensor(local, mesh))
    assert frozen.is_inference() and not frozen.to_local().is_inference()
    net = nn.ParameterDict({"plain": nn.Parameter(torch.zeros(2)), "frozen": frozen})
    state = {"local": local, "net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0)}
    assert fenced(state) == ["net.plain"]


@pytest.mark.parametrize("at", [0, 3, -1])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 2000),
        lambda: torch.zeros(2000, 3).t(),
        lambda: torch.zeros(7, dtype=torch.bfloat16),
        lambda: torch.zeros((), dtype=torch.float64),
        lambda: torch.zeros(31, dtype=torch.uint8)[1:30],
        lambda: torch.zeros(5, 9, dtype=torch.complex64).t(),
        lambda: torch.zeros(2, 500)[:, ::2],
    ],
)
def test_a_sample_shows_writes_to_the_whole_tensor_and_none_beside_it(
    make: Callable[[], torch.Tensor], at: int
) -> None:
    tensors = [make() for _ in range(5)]
    pieces = [Piece.of(tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for tensor in tensors]
    sample = MemorySample(pieces, [piece.address for piece in pieces])
    assert sample.changed({}) == []
    storage = torch.zeros(0, dtype=torch.uint8).set_(tensors[at].untyped_storage())
    storage.fill_(255)
    tensors[at].data.zero_()
    assert sample.changed({}) == []
    tensors[at].data.fill_(1)
    assert sample.changed({}) == [at % 5]


def test_a_sample_of_memory_that_was_given_back_reads_nothing() -> None:
    tensor = torch.zeros(1 << 20)
    sample = MemorySample([Piece.of(tensor, (0,), (1 << 20,))], [tensor.data_ptr()])
    tensor.untyped_storage().resize_(0)
    assert sample.changed({}) == [0]
