"""The read-once exchange into memory of the simulated device: threads use their caller's stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof._utils.accelerator import on_stream
from shardproof.engine.loading import LoadOptions, load_from, load_protocol
from shardproof.engine.loading.read_once import group_collectives
from shardproof.engine.saving import Saver
from shardproof.errors import RankFailure
from shardproof.rendezvous import LocalRendezvous, connect
from shardproof.storage import LocalStorage
from tests import simulated
from tests.distributed.test_read_once import small_rounds, transfer_only_through
from tests.harness import process_group, rank, run_ranks

pytestmark = pytest.mark.skipif(bool(simulated.why_not()), reason=simulated.why_not())

SHAPE, COUNT = (64, 32), 6


def value(number: int) -> torch.Tensor:
    return torch.arange(float(SHAPE[0] * SHAPE[1])).reshape(SHAPE) + number


def load_late(folder: str, way: str) -> bool:
    simulated.load()
    load_protocol.reading_threads = lambda: 3  # type: ignore[attr-defined]
    transfer_only_through(way)
    small_rounds(4096)
    own = torch.Stream("simulated:0")
    with process_group(), on_stream(own, own.device):
        state = {
            str(number): torch.empty(SHAPE[::-1], device="simulated").t()
            if number % 2
            else torch.empty(SHAPE, device="simulated")
            for number in range(COUNT)
        }
        own.synchronize()
        simulated.set_delays(0.02, seed=1)
        for target in state.values():
            for _ in range(40):
                target.fill_(-1)
        report = load_from(LocalStorage(folder), state, connect(), LoadOptions(read_once=True))
        doubled = [target * 2 for target in state.values()]
        assert report.read_once and report.received
        return all(torch.equal(found.cpu(), value(number) * 2) for number, found in enumerate(doubled))


@pytest.mark.parametrize("way", ["memory", "group"])
def test_a_load_is_ordered_with_its_callers_stream(way: str, tmp_path: Path) -> None:
    simulated.library()
    state = {str(number): value(number) for number in range(COUNT)}
    Saver(LocalRendezvous(), chunk_bytes=512).save(LocalStorage(tmp_path), state)
    for outcome in run_ranks(2, load_late, str(tmp_path), way, timeout=120):
        assert outcome.value


class FullDevice(TorchDispatchMode):
    """Fails the device's allocations of these sizes."""

    def __init__(self, sizes: range) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if kwargs.get("device") is not None and result.device.type != "cpu" and result.nbytes in self.sizes:
            raise torch.OutOfMemoryError("no room on the device")
        return result


class FinishedWork:
    def wait(self) -> None:
        pass


def use_device_collectives() -> None:
    """Makes the group take only tensors of the simulated device, as NCCL takes only those of a GPU."""
    all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single

    def reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert tensor.device.type == "simulated"
        host = tensor.cpu()
        all_reduce(host, op, group=group)
        tensor.copy_(host)

    def exchanged(
        into: torch.Tensor, sent: torch.Tensor, *sizes: Any, group: Any, async_op: bool
    ) -> FinishedWork:
        assert async_op and (into.device.type, sent.device.type) == ("simulated", "simulated")
        host = torch.empty(into.shape, dtype=into.dtype)
        all_to_all(host, sent.cpu(), *sizes, group=group)
        into.copy_(host)
        return FinishedWork()

    dist.all_reduce, dist.all_to_all_single = reduce, exchanged  # type: ignore[assignment]
    group_collectives.device_of_group = lambda group: torch.device("simulated", 0)


def load_over_the_device(folder: str, full: range) -> tuple[str, dict[str, str]]:
    simulated.load()
    transfer_only_through("group")
    small_rounds(600)
    with process_group():
        use_device_collectives()
        state = {str(number): torch.empty(SHAPE) for number in range(COUNT)}
        try:
            with FullDevice(full if rank() == 1 else range(0)):
                load_from(LocalStorage(folder), state, connect(), LoadOptions(read_once=True))
        except RankFailure as error:
            dist.barrier()  # the group is still in step
            return error.phase, {str(key): cause for key, cause in error.causes.items()}
        assert all(torch.equal(found, value(int(number))) for number, found in state.items())
        return "loaded", {}


@pytest.mark.parametrize(
    ("full", "ends"),
    [(range(0), "loaded"), (range(5, 1 << 22), "read")],
    ids=["there is room", "no room for a round"],
)
def test_a_full_device_on_one_rank_is_an_error_on_every_rank(full: range, ends: str, tmp_path: Path) -> None:
    simulated.library()
    state = {str(number): value(number) for number in range(COUNT)}
    Saver(LocalRendezvous(), chunk_bytes=512).save(LocalStorage(tmp_path), state)
    for outcome in run_ranks(2, load_over_the_device, str(tmp_path), full, timeout=60):
        phase, causes = outcome.value
        assert phase == ends
        assert list(causes) == ([] if ends == "loaded" else ["1"])
        assert all("no room on the device" in cause for cause in causes.values())
