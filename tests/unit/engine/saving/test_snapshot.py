"""Saving while training goes on: no value that changes after `save` returned reaches the checkpoint."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor

import shardproof as sp
from shardproof import events
from shardproof.engine.saving import background
from shardproof.engine.saving.background import unfinished
from shardproof.engine.saving.cache import SaveCache
from shardproof.engine.saving.shard_writer import BufferPool
from shardproof.engine.saving.staging import StagingPool
from shardproof.engine.storage.sink import LocalSink
from shardproof.errors import SaveSkipped, StorageError, StructureError
from shardproof.optim import HybridDeviceOptimizer
from shardproof.rendezvous import LocalRendezvous
from shardproof.state import collect
from tests.accelerator import first_device
from tests.gate import LIMIT, Gate


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write takes a random time, so that training meets the writer anywhere."""
    draw = random.Random(7)
    write_at = LocalSink.write_at

    def delayed(sink: LocalSink, start: int, buffer: memoryview) -> None:
        threading.Event().wait(draw.choice((0.0, 0.0, 0.001, 0.003)))
        write_at(sink, start, buffer)

    monkeypatch.setattr(LocalSink, "write_at", delayed)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("seen", torch.zeros(50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


def trained(kind: str, device: torch.device | None = None) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer: torch.optim.Optimizer
    if kind == "offloaded":
        net.to(torch.bfloat16)
        optimizer = HybridDeviceOptimizer(
            net.parameters(),
            torch.optim.AdamW,
            cpu_fraction=1.0,
            pin_memory=True,
            master_dtype=torch.float32,
            lr=0.01,
        )
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train_step(net, optimizer)
    return net, optimizer


def train_step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Forward changes buffers at once; the step changes the rest."""
    net(torch.randn(8, 64).to(net.seen.device, next(net.parameters()).dtype)).sum().backward()
    net.seen.add_(1)
    optimizer.step()
    optimizer.zero_grad()


def bits(state: Any) -> dict[str, torch.Tensor]:
    """A copy of every tensor of a state, by key."""
    return {entry.key: piece.view.clone() for entry in collect(state).tensors for piece in entry.pieces}


def assert_saved(folder: Path, want: dict[str, torch.Tensor]) -> None:
    with sp.open(folder) as checkpoint:
        for key, value in want.items():
            assert torch.equal(checkpoint[key][...], value.cpu()), key


def cache_of(checkpointer: sp.Checkpointer) -> SaveCache:
    """The buffers between saves, which no result of a save shows."""
    return checkpointer._saver._own_cache()


def small_buffers(checkpointer: sp.Checkpointer, nbytes: int = 4096) -> None:
    """Gives the writer small buffers, so that a small state takes many writes."""
    cache_of(checkpointer).buffers = BufferPool(nbytes, 3)


@pytest.fixture
def copied() -> Iterator[dict[str, int]]:
    """Bytes that the saves of a test copied before they returned ("stage"), and before a step ("fence")."""
    nbytes = {"stage": 0, "fence": 0}

    def listen(event: events.Event) -> None:
        if event.phase in nbytes:
            nbytes[event.phase] = max(nbytes[event.phase], event.done)

    with events.subscribe(listen):
        yield nbytes


def folder_of(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("kind", ["plain", "offloaded"])
@pytest.mark.parametrize("snapshot", ["fence", "stage"])
@pytest.mark.parametrize("where", ["host", pytest.param("device", marks=pytest.mark.gpu)])
def test_changes_after_save_returned_are_not_saved(
    where: str, snapshot: Any, kind: str, tmp_path: Path
) -> None:
    net, optimizer = trained(kind, first_device() if where == "device" else None)
    ema = [parameter.detach().clone() for parameter in net.parameters()]
    loose = torch.zeros(3000, device=net.seen.device)
    strided = torch.arange(6.0).view(2, 3).t()  # gathered on the host, between tensors of the device
    state = {"net": net, "optimizer": optimizer, "ema": ema, "loose": loose, "m": strided}
    checkpointer = sp.Checkpointer(tmp_path, snapshot=snapshot, keep=sp.KeepLatest(1))
    pending = None
    for step in range(1, 13):
        small_buffers(checkpointer, 16384)
        want = bits(state)
        pending = checkpointer.save(step, state)
        state["loose"].add_(1)
        for average, parameter in zip(ema, net.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)
        train_step(net, optimizer)
        pending.result(LIMIT)
        assert_saved(folder_of(tmp_path, step), want)


@pytest.mark.parametrize("snapshot", ["fence", "stage"])
def test_small_tensors_around_large_ones_have_the_values_of_the_save(snapshot: Any, tmp_path: Path) -> None:
    """Small tensors are copied, staged and hashed in groups. Large ones between them are not."""
    draw = random.Random(3)
    state: dict[str, Any] = {}
    for number in range(200):
        shape = draw.choice([(), (3,), (40, 25), (1024,), (300, 300)])
        tensor = torch.randn(shape)
        state[f"t{number:03}"] = tensor.t() if len(shape) == 2 and number % 3 == 0 else tensor
    want = bits(state)
    checkpointer = sp.Checkpointer(tmp_path, snapshot=snapshot)
    small_buffers(checkpointer, 1 << 16)
    for step in (1, 2):
        pending = checkpointer.save(step, state)
        for tensor in state.values():
            tensor.add_(1)
        pending.result(LIMIT)
        assert_saved(folder_of(tmp_path, step), want)
        want = bits(state)
    sp.save(tmp_path / "at once", state)
    assert_saved(tmp_path / "at once", want)


def test_parameters_are_read_live_until_a_step(gate: Gate, copied: dict[str, int], tmp_path: Path) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer}
    want = bits(state)
    checkpointer = sp.Checkpointer(tmp_path)
    small_buffers(checkpointer)
    pending = checkpointer.save(1, state)
    assert gate.reached.wait(LIMIT)
    buffers = sum(buffer.nbytes for buffer in net.buffers())
    assert copied["stage"] <= buffers and copied["fence"] == 0
    assert not pending.done()
    train_step(net, optimizer)
    assert copied["fence"] > 0
    gate.open()
    pending.result(LIMIT)
    assert_saved(folder_of(tmp_path, 1), want)


def test_staging_reads_nothing_live(gate: Gate, tmp_path: Path) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer}
    want = bits(state)
    checkpointer = sp.Checkpointer(tmp_path, snapshot="stage")
    small_buffers(checkpointer)
    pending = checkpointer.save(1, state)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data.zero_()  # past the version that torch keeps
    gate.open()
    pending.result(LIMIT)
    assert_saved(folder_of(tmp_path, 1), want)


def test_an_optimizer_that_is_not_saved_opens_the_fence_of_what_it_writes(
    gate: Gate, copied: dict[str, int], tmp_path: Path
) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer}
    want = bits(state)
    other = torch.optim.SGD(net.layers[2].parameters(), lr=1.0)
    stranger = nn.Linear(2, 2)
    checkpointer = sp.Checkpointer(tmp_path)
    small_buffers(checkpointer)
    pending = checkpointer.save(1, state)
    net(torch.randn(8, 64)).sum().backward()
    stranger(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(stranger.parameters(), lr=1.0).step()
    without_memory = [
        *nn.LazyLinear(2).parameters(),
        nn.Parameter(torch.ones(2, device="meta")),
        nn.Parameter(torch.ones(0, 2)),
    ]
    torch.optim.SGD(without_memory, lr=1.0).step()
    assert copied["fence"] == 0
    other.add_param_group({"params": without_memory})
    other.step()
    assert copied["fence"] > 0
    gate.open()
    pending.result(LIMIT)
    assert_saved(folder_of(tmp_path, 1), want)


@pytest.mark.parametrize(
    "hide",
    [lambda tensor: TwoTensor(tensor, tensor.clone()), torch.Tensor.to_sparse],
    ids=["made of other tensors", "sparse"],
)
def test_an_optimizer_whose_memory_is_not_known_opens_the_fence(
    hide: Callable[[torch.Tensor], torch.Tensor], gate: Gate, tmp_path: Path
) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer}
    want = bits(state)
    other = torch.optim.SGD([nn.Parameter(hide(net.layers[2].weight.detach()))], lr=1.0)
    checkpointer = sp.Checkpointer(tmp_path)
    small_buffers(checkpointer)
    pending = checkpointer.save(1, state)
    other.step()
    with torch.no_grad():
        net.layers[2].weight.zero_()  # as a step might have
    gate.open()
    pending.result(LIMIT)
    assert_saved(folder_of(tmp_path, 1), want)


def test_a_write_without_a_fence_fails_the_save_and_names_the_tensor(gate: Gate, tmp_path: Path) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer}
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.wait()
    small_buffers(checkpointer)
    pending = checkpointer.save(1, state)
    assert gate.reached.wait(LIMIT)
    with torch.no_grad():
        net.layers[2].weight.clamp_(-0.01, 0.01)
    gate.open()
    with pytest.raises(StructureError, match=r"net\.layers\.2\.weight was changed .*fence\(\)"):
        pending.result(LIMIT)
    assert checkpointer.steps() == []
    gate.close()
    want = bits(state)
    pending = checkpointer.save(2, state)
    checkpointer.fence()
    with torch.no_grad():
        net.layers[2].weight.zero_()
        net.layers[2].weight.data.add_(1)
    gate.open()
    pending.result(LIMIT)
    assert_saved(folder_of(tmp_path, 2), want)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight, slot: weight.clamp_(-0.01, 0.01),
        lambda weight, slot: weight.detach().mul_(2),
        lambda weight, slot: weight.to_local().mul_(2),
        lambda weight, slot: slot.mul_(2),
    ],
    ids=["parameter", "detached", "local tensor", "slot"],
)
def test_a_write_to_a_dtensor_without_a_fence_fails_the_save(
    write: Callable[[DTensor, DTensor], Any], mesh: DeviceMesh, gate: Gate, tmp_path: Path
) -> None:
    net = nn.Linear(64, 64)
    net.weight = weight = nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = {"net": net, "optimizer": optimizer}
    checkpointer = sp.Checkpointer(tmp_path, rendezvous=LocalRendezvous())
    small_buffers(checkpointer, 2048)
    for step, fenced in enumerate((False, True)):
        want = bits(state)
        gate.close()
        pending = checkpointer.save(step, state)
        assert gate.reached.wait(LIMIT)
        if fenced:
            checkpointer.fence()
        with torch.no_grad():
            write(weight, optimizer.state[weight]["exp_avg"])
        gate.open()
        if fenced:
            pending.result(LIMIT)
            assert_saved(folder_of(tmp_path, step), want)
        else:
            with pytest.raises(StructureError, match=r"was changed .*fence\(\)"):
                pending.result(LIMIT)


def test_a_write_that_fails_while_its_future_is_polled_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndsWhenPolled(Future[Any]):
        """`done` returns False once, although the future has ended by then."""

        was_polled = False

        def done(self) -> bool:
            if self.was_polled:
                return super().done()
            self.was_polled = True
            self.exception(LIMIT)
            return False

    write_at, failed = LocalSink.write_at, list[int]()

    def full_once(sink: LocalSink, start: int, buffer: memoryview) -> None:
        if not failed:
            failed.append(start)
            raise StorageError("the disk is full")
        write_at(sink, start, buffer)

    checkpointer = sp.Checkpointer(tmp_path)
    small_buffers(checkpointer)
    monkeypatch.setattr(LocalSink, "write_at", full_once)
    monkeypatch.setattr(background, "Future", EndsWhenPolled)
    with pytest.raises(StorageError, match="the disk is full"):
        checkpointer.save(1, {"w": torch.randn(10_000)}).result(LIMIT)
    assert failed and checkpointer.steps() == []


def test_a_load_opens_the_fence(gate: Gate, tmp_path: Path) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer}
    gate.open()
    sp.save(tmp_path / "before", state)
    train_step(net, optimizer)
    want = bits(state)
    checkpointer = sp.Checkpointer(tmp_path / "run")
    small_buffers(checkpointer)
    gate.close()
    pending = checkpointer.save(1, state)
    assert gate.reached.wait(LIMIT)
    sp.load(tmp_path / "before", state)
    gate.open()
    pending.result(LIMIT)
    assert_saved(folder_of(tmp_path / "run", 1), want)


@pytest.mark.parametrize("budget", [0, 3 << 20])
def test_copies_never_take_more_than_the_budget(budget: int, tmp_path: Path, delays: None) -> None:
    state = {f"{number}": torch.randn(256, 1024) for number in range(12)}  # 1 MiB each
    checkpointer = sp.Checkpointer(tmp_path, host_memory_budget=budget)
    for step in (1, 2):
        want = bits(state)
        pending = checkpointer.save(step, state)
        for value in state.values():
            value.add_(1)
        pending.result(LIMIT)
        assert cache_of(checkpointer).staging.size <= budget
        assert_saved(folder_of(tmp_path, step), want)


def test_a_full_budget_is_logged(gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"large": torch.randn(512, 1024)}
    checkpointer = sp.Checkpointer(tmp_path, host_memory_budget=0)
    saves: list[Any] = []
    thread = threading.Thread(target=lambda: saves.append(checkpointer.save(1, state)))
    with caplog.at_level(logging.WARNING, "shardproof"):
        small_buffers(checkpointer, 1 << 18)
        thread.start()
        assert gate.reached.wait(LIMIT)
        thread.join(1.0)
        assert thread.is_alive()  # the save waits, for nothing can be copied
        gate.open()
        thread.join(LIMIT)
        saves[0].result(LIMIT)
    assert saves[0].blocked >= 0.9
    assert any("host_memory_budget" in record.message for record in caplog.records)


def test_memory_for_copies_is_reused(gate: Gate, tmp_path: Path) -> None:
    state = {"weight": torch.randn(1 << 20)}
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.wait()
    small_buffers(checkpointer)  # the writer cannot copy all of the tensor before the gate
    sizes = []
    for step in (1, 2, 3):
        gate.close()
        pending = checkpointer.save(step, state)
        checkpointer.fence()  # nothing is written yet, so all values are copied
        gate.open()
        pending.result(LIMIT)
        sizes.append(cache_of(checkpointer).staging.size)
    assert sizes == [4 << 20] * 3


def test_memory_for_a_failed_copy_is_released(gate: Gate, tmp_path: Path) -> None:
    net, optimizer = trained("plain")
    checkpointer = sp.Checkpointer(tmp_path)
    checkpointer.wait()
    small_buffers(checkpointer)
    pending = checkpointer.save(1, {"net": net, "optimizer": optimizer})
    assert gate.reached.wait(LIMIT)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    optimizer.step()
    gate.open()
    with pytest.raises(StructureError, match="was changed"):
        pending.result(LIMIT)
    pool = cache_of(checkpointer).staging
    with pool.changed:
        assert pool.size and pool.take(pool.size) is not None, "all of it is free"


def test_a_hanging_writer_does_not_block_training(gate: Gate, tmp_path: Path) -> None:
    net, optimizer = trained("plain")
    checkpointer = sp.Checkpointer(tmp_path, deadline=0.5, host_memory_budget=0)
    small_buffers(checkpointer)
    pending = checkpointer.save(1, {"optimizer": sp.OptimizerState(optimizer, net)})
    assert gate.reached.wait(LIMIT)
    train_step(net, optimizer)  # returns
    gate.open()
    with pytest.raises(StorageError, match="no progress"):
        pending.result(LIMIT)
    assert checkpointer.steps() == []


@pytest.mark.parametrize("call", ["result", "wait", "save"])
def test_every_call_that_waits_for_a_hanging_storage_ends(call: str, gate: Gate, tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, deadline=0.3)
    state = {"weight": torch.zeros(1000)}
    pending = checkpointer.save(1, state)
    calls: dict[str, Callable[[], Any]] = {
        "result": pending.result,
        "wait": checkpointer.wait,
        "save": lambda: checkpointer.save(2, state),
    }
    with pytest.raises(StorageError, match="the storage hangs"):
        calls[call]()
    gate.open()
    assert pending.result(LIMIT).step == 1


def test_a_save_waits_for_the_previous_save_or_is_skipped(gate: Gate, tmp_path: Path) -> None:
    state = {"weight": torch.zeros(1000)}
    checkpointer = sp.Checkpointer(tmp_path)
    first = checkpointer.save(1, state)
    skipped = checkpointer.save(2, state, when_busy="skip")
    assert (skipped.skipped, skipped.done(), first.done()) == (True, True, False)
    with pytest.raises(SaveSkipped, match="step 2"):
        skipped.result()
    for until_over in (checkpointer.wait, first.result, first.durable, first.future().result):
        with pytest.raises(TimeoutError, match=r"the save of step 1 has not ended after 0\.01 s"):
            until_over(0.01)
    opener = threading.Timer(0.5, gate.open)
    opener.start()
    second = checkpointer.save(3, state)
    assert first.done()
    assert second.blocked >= 0.1
    assert checkpointer.save(4, state, when_busy="wait").result(LIMIT).step == 4
    assert checkpointer.steps() == [1, 3, 4]
    opener.join()


@pytest.mark.parametrize("call", ["save", "wait", "result"])
def test_a_failure_in_the_background_is_raised_once(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.zeros(1000)}
    checkpointer = sp.Checkpointer(tmp_path)
    write_at = LocalSink.write_at

    def full(sink: LocalSink, start: int, buffer: memoryview) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(LocalSink, "write_at", full)
    pending = checkpointer.save(1, state)
    assert not wait([pending.future()], LIMIT).not_done  # without a question for the error
    assert "the disk is full" in caplog.text
    monkeypatch.setattr(LocalSink, "write_at", write_at)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpointer.save(2, state),
        "wait": checkpointer.wait,
        "result": pending.result,
    }
    with pytest.raises(StorageError, match="the disk is full"):
        calls[call]()
    checkpointer.wait()
    checkpointer.save(3, state).result(LIMIT)
    assert checkpointer.steps() == [3]


def test_a_child_made_by_fork_trains_without_the_parents_fence(
    gate: Gate, copied: dict[str, int], tmp_path: Path
) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer}
    want = bits(state)
    checkpointer = sp.Checkpointer(tmp_path, deadline=5.0)
    small_buffers(checkpointer)
    pending = checkpointer.save(1, state)
    assert gate.reached.wait(LIMIT)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            torch.set_num_threads(1)  # the threads of OpenMP and of autograd did not come along
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert copied["stage"] <= 4096 and copied["fence"] == 0
    gate.open()
    pending.result(LIMIT)
    assert_saved(folder_of(tmp_path, 1), want)


def test_a_child_made_by_fork_waits_for_no_save_of_its_parent(gate: Gate, tmp_path: Path) -> None:
    checkpointer = sp.Checkpointer(tmp_path, deadline=60.0)
    pending = checkpointer.save(1, {"w": torch.ones(10)})
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            torch.set_num_threads(1)
            gate.open()
            checkpointer.wait()
            with pytest.raises(RuntimeError, match="began in the parent of this forked process"):
                pending.result()
            assert not checkpointer.save(2, {"w": torch.ones(10)}, when_busy="skip").skipped
            checkpointer.wait()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    gate.open()
    pending.result(LIMIT)
    assert checkpointer.steps() == [1, 2]


def test_a_save_may_end_while_a_step_goes_through_its_hooks(gate: Gate, tmp_path: Path) -> None:
    net, optimizer = trained("plain")
    checkpointer = sp.Checkpointer(tmp_path)

    def save_ends(*_: Any) -> None:
        gate.open()
        pending.result(LIMIT)

    hook = register_optimizer_step_pre_hook(save_ends)
    try:
        pending = checkpointer.save(1, {"net": net, "optimizer": optimizer})
        train_step(net, optimizer)
    finally:
        hook.remove()
    assert checkpointer.steps() == [1]


def test_an_interrupt_before_all_is_copied_commits_nothing(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weight": torch.ones(10_000)}
    checkpointer = sp.Checkpointer(tmp_path)
    small_buffers(checkpointer)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, state)
    state["weight"].zero_()
    gate.open()
    checkpointer.wait()  # raises nothing: the interrupt was the error
    assert checkpointer.steps() == []
    checkpointer.save(2, state).result(LIMIT)
    assert checkpointer.steps() == [2]


@pytest.mark.parametrize("call", ["save", "fence", "step"])
def test_an_interrupt_is_raised_once_and_what_it_ended_names_it(
    call: str, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = trained("plain")
    state = {"net": net, "optimizer": optimizer, "unfenced": torch.ones(10_000)}
    checkpointer = sp.Checkpointer(tmp_path)
    small_buffers(checkpointer)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt("first")

    pending = None
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpointer.save(1, state),
        "fence": checkpointer.fence,
        "step": lambda: train_step(net, optimizer),
    }
    if call != "save":
        pending = checkpointer.save(1, state)
    with monkeypatch.context() as patch:
        patch.setattr(StagingPool, "take", interrupted)
        with pytest.raises(KeyboardInterrupt, match="first"):
            calls[call]()
    checkpointer.fence()
    train_step(net, optimizer)
    gate.open()
    if pending is not None:
        with pytest.raises(sp.ShardproofError, match="KeyboardInterrupt: first"):
            pending.result(LIMIT)
    assert checkpointer.steps() == []
    checkpointer.save(2, state).result(LIMIT)
    assert checkpointer.steps() == [2]
