"""Saves under way when a rank fails, is busy, leaves its process group, ends or gets SIGTERM."""

from __future__ import annotations

import signal
import socket
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.engine.saving import Saver
from shardproof.engine.storage.sink import LocalSink
from shardproof.errors import ShardproofError, StorageError
from shardproof.storage import LocalStorage
from tests.harness import process_group, rank, rendezvous, run_ranks
from tests.programs import become_program

LIMIT = 60.0


def gate_writes() -> threading.Event:
    """Writes wait until the event is set."""
    write_at, gate = LocalSink.write_at, threading.Event()

    def gated(sink: LocalSink, start: int, buffer: memoryview) -> None:
        assert gate.wait(LIMIT)
        write_at(sink, start, buffer)

    LocalSink.write_at = gated  # type: ignore[method-assign]
    return gate


def state_of(step: int) -> dict[str, Any]:
    return {"mine": sp.PerRank(torch.full((3000,), float(step))), "shared": torch.full((3000,), float(step))}


def skip_if_any_is_busy(root: str) -> tuple[bool, bool, list[int]]:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0))
    gate = gate_writes()
    if rank() == 0:
        gate.set()
    first = checkpointer.save(1, state_of(1))
    skipped = checkpointer.save(2, state_of(2), when_busy="skip")
    under_way = not first.done()
    gate.set()
    first.result(LIMIT)
    checkpointer.save(3, state_of(3), when_busy="wait").result(LIMIT)
    return skipped.skipped, under_way, checkpointer.steps()


def test_all_ranks_skip_while_one_writes(tmp_path: Path) -> None:
    outcomes = run_ranks(2, skip_if_any_is_busy, str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [(True, True, [1, 3])] * 2


def skip_while_one_has_work_after_the_commit(root: str) -> tuple[bool, bool]:
    """The save is over on rank 0; rank 1 still runs the work after the commit."""
    saver, gate = Saver(rendezvous(deadline=20.0)), threading.Event()

    def tidy(*_: Any) -> None:
        assert rank() == 0 or gate.wait(LIMIT)

    first = saver.begin(LocalStorage(f"{root}/1"), state_of(1), after=tidy)
    if rank() == 0:
        first.result(LIMIT)
    over = first.done()
    skipped = saver.begin(LocalStorage(f"{root}/2"), state_of(2), when_busy="skip")
    gate.set()
    first.result(LIMIT)
    saver.begin(LocalStorage(f"{root}/3"), state_of(3)).result(LIMIT)
    return over, skipped.skipped


def test_all_ranks_skip_while_one_has_work_after_the_commit(tmp_path: Path) -> None:
    outcomes = run_ranks(2, skip_while_one_has_work_after_the_commit, str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [(True, True), (False, True)]
    assert not (tmp_path / "2").exists()


def fails_on_one_rank(root: str, ask: str) -> tuple[str, str, list[int]]:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0))
    checkpointer.save(1, state_of(1)).result(LIMIT)
    write_at = LocalSink.write_at
    if rank() == 1:

        def full(sink: LocalSink, start: int, buffer: memoryview) -> None:
            raise StorageError("the disk is full")

        LocalSink.write_at = full  # type: ignore[method-assign]
    pending = checkpointer.save(2, state_of(2))
    assert not wait([pending.future()], LIMIT).not_done
    LocalSink.write_at = write_at  # type: ignore[method-assign]
    try:
        if ask == "wait":
            checkpointer.wait(LIMIT)
        elif ask == "one asked" and rank() == 0:
            with pytest.raises(ShardproofError):
                pending.result(LIMIT)
            checkpointer.save(3, state_of(3))
        else:
            checkpointer.save(3, state_of(3))
        failure = ("", "")
    except ShardproofError as error:
        failure = (type(error).__name__, str(error))
    checkpointer.save(4, state_of(4)).result(LIMIT)
    return (*failure, checkpointer.steps())


@pytest.mark.parametrize("ask", ["save", "wait", "one asked"])
def test_a_failure_in_the_background_reaches_every_rank(ask: str, tmp_path: Path) -> None:
    outcomes = run_ranks(2, fails_on_one_rank, str(tmp_path), ask)
    assert [outcome.value for outcome in outcomes] == [outcomes[0].value] * 2
    kind, text, steps = outcomes[0].value
    assert (kind, steps) == ("RankFailure", [1, 4])
    assert "rank 1" in text
    assert "the disk is full" in text


def change_all(root: str, snapshot: Any) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    with process_group():
        model = torch.nn.Sequential(*[torch.nn.Linear(33, 33) for _ in range(4)])
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}

        def step() -> None:
            model(torch.ones(2, 33)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def local_tensors() -> list[torch.Tensor]:
            tensors = [parameter.to_local() for parameter in model.parameters()]
            slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
            return [*tensors, *(slot.to_local() if hasattr(slot, "to_local") else slot for slot in slots)]

        step()
        checkpointer = sp.Checkpointer(root, snapshot=snapshot)
        wrong = []
        for number in range(1, 6):
            want = [tensor.detach().clone() for tensor in local_tensors()]
            pending = checkpointer.save(number, state)
            step()
            step()
            pending.result(LIMIT)
            assert checkpointer.restore(state) == number
            for at, (tensor, before) in enumerate(zip(local_tensors(), want, strict=True)):
                if not torch.equal(tensor, before):
                    wrong.append(f"{number}: {at}")
        return wrong


@pytest.mark.parametrize("snapshot", ["fence", "stage"])
def test_sharded_training_goes_on_during_a_save(snapshot: str, tmp_path: Path) -> None:
    outcomes = run_ranks(2, change_all, str(tmp_path), snapshot)
    assert [outcome.value for outcome in outcomes] == [[], []]


def save_on_nodes(root: str, nodes: list[str]) -> None:
    socket.gethostname = lambda: nodes[rank()]  # type: ignore[assignment]
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=20.0))
    checkpointer.save(1, {f"shared-{row}": torch.ones(1 << 18) for row in range(12)}).result(LIMIT)


def test_nodes_write_equal_shares_of_replicas(tmp_path: Path) -> None:
    run_ranks(3, save_on_nodes, str(tmp_path), ["a", "a", "b"])
    shards = sorted((tmp_path / "step-00000001" / "shards").iterdir())
    assert [round(shard.stat().st_size / 2**20) for shard in shards] == [3, 3, 6]


SCRIPT = """
import os, sys, threading
import torch
import torch.distributed as dist
import shardproof as sp
from shardproof.engine.saving import Saver
from shardproof.storage import LocalStorage
from shardproof.engine.storage.sink import LocalSink

root, how = sys.argv[1:]
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
checkpointer = sp.Checkpointer(root)
weight = torch.nn.Parameter(torch.arange(100_000.0))
optimizer = torch.optim.SGD([weight], lr=1.0)
state = {"weight": weight}
how, _, early = how.partition(" ")
if early:  # what only an optimizer changes: ranks agree in the background
    state["optimizer"] = sp.OptimizerState(optimizer, names={"weight": weight})

def add_one():
    weight.grad = -torch.ones(100_000)
    optimizer.step()

checkpointer.save(1, state).result(60)

# Writes go on only when this program has ended.
write_at, ended = LocalSink.write_at, threading.Event()
def gated(sink, start, buffer):
    ended.wait(60)
    write_at(sink, start, buffer)
LocalSink.write_at = gated
def when_the_program_ends():
    threading.main_thread().join()
    ended.set()
threading.Thread(target=when_the_program_ends, daemon=True).start()

add_one()
checkpointer.save(2, state)
if not early:
    add_one()
if how == "destroy":
    dist.destroy_process_group()
if how == "exit":
    sys.exit(3)
if how == "raise":
    raise RuntimeError("training failed")
if how == "term":
    os.kill(os.getpid(), 15)
"""


def run_script(root: Path, how: str, ranks: int) -> list[int | None]:
    outcomes = run_ranks(ranks, become_program, SCRIPT, str(root), how, store="rank 0", timeout=LIMIT)
    return [outcome.exit_code for outcome in outcomes]


@pytest.mark.parametrize(
    ("how", "code", "ranks"), [("end", 0, 1), ("exit", 3, 2), ("exit early", 3, 2), ("raise", 1, 1)]
)
def test_a_program_finishes_its_save_before_it_ends(how: str, code: int, ranks: int, tmp_path: Path) -> None:
    assert run_script(tmp_path, how, ranks) == [code] * ranks
    assert sp.Checkpointer(tmp_path).steps() == [1, 2]
    with sp.open(tmp_path / "step-00000002") as checkpoint:
        assert torch.equal(checkpoint["weight"][...], torch.arange(100_000.0) + 1)


@pytest.mark.parametrize("how", ["destroy", "destroy early"])
def test_a_save_outlives_its_process_group(how: str, tmp_path: Path) -> None:
    assert run_script(tmp_path, how, 2) == [0, 0]
    assert sp.Checkpointer(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_leaves_no_partial_checkpoint(ranks: int, tmp_path: Path) -> None:
    assert run_script(tmp_path, "term", ranks) == [-signal.SIGTERM] * ranks
    assert sp.Checkpointer(tmp_path).steps() == [1]
    state = {"weight": torch.zeros(100_000)}
    again = sp.Checkpointer(tmp_path)
    assert again.restore(state) == 1
    assert torch.equal(state["weight"], torch.arange(100_000.0))
    again.save(2, state).result(LIMIT)
    assert again.steps() == [1, 2]
