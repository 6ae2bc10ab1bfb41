"""What a save may read live, and what tells that it was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardproof.saving.write_watch import WriteWatch
from shardproof.state import collect


def watch_of(state: Any) -> tuple[WriteWatch, list[str]]:
    """The watch over a state, and the keys of its pieces."""
    collected = collect(state)
    pieces = [(piece, entry.key) for entry in collected.tensors for piece in entry.pieces]
    return WriteWatch([piece for piece, _ in pieces], collected.stepped), [key for _, key in pieces]


def fenced(state: Any) -> list[str]:
    """The keys of what may be read live."""
    watch, keys = watch_of(state)
    return [key for row, key in enumerate(keys) if watch.is_fenced(row)]


def changed(state: Any, write: Callable[[], object]) -> list[str]:
    """The keys that are said to be changed once something was written."""
    watch, keys = watch_of(state)
    assert not any(watch.is_changed(row) for row in range(len(keys)))
    with torch.no_grad():
        write()
    return [key for row, key in enumerate(keys) if watch.is_changed(row)]


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


def test_what_shares_memory_with_a_parameter_is_fenced_and_watched() -> None:
    whole = torch.zeros(8)
    net = nn.Linear(4, 1, bias=False)
    net.weight = nn.Parameter(whole[:4].view(1, 4))
    rest = torch.zeros(0).set_(whole.untyped_storage(), 4, (4,))  # counts its writes by itself
    state = {"net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0), "rest": rest}
    assert fenced(state) == ["net.weight", "rest"]
    assert changed(state, lambda: net.weight.add_(1)) == ["net.weight"]
    assert changed(state, lambda: rest.add_(1)) == ["rest"]


def test_dtensors_of_one_memory_tell_of_each_other(mesh: DeviceMesh) -> None:
    """An operation on a DTensor is counted by it alone, so each is asked that may have written."""
    local = torch.zeros(8)
    first, second = (nn.Parameter(dtensor(part, mesh)) for part in (local[:4], local[4:]))
    apart = nn.Parameter(torch.zeros(2))
    net = nn.ParameterDict({"first": first, "second": second, "apart": apart})
    state = {"net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0)}
    assert fenced(state) == ["net.apart", "net.first", "net.second"]
    for parameter in (first, second):
        assert changed(state, lambda: parameter.add_(1)) == ["net.first", "net.second"]  # noqa: B023
    assert changed(state, lambda: apart.add_(1)) == ["net.apart"]


def test_what_a_dtensor_that_counts_no_writes_is_part_of_is_not_fenced(mesh: DeviceMesh) -> None:
    local = torch.zeros(4)
    with torch.inference_mode():
        frozen = nn.Parameter(dtensor(local, mesh))
    assert frozen.is_inference() and not frozen.to_local().is_inference()
    net = nn.ParameterDict({"plain": nn.Parameter(torch.zeros(2)), "frozen": frozen})
    state = {"local": local, "net": net, "step": torch.optim.SGD(net.parameters(), lr=1.0)}
    assert fenced(state) == ["net.plain"]
