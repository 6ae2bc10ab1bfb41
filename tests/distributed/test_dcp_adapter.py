"""The adapter for torch DCP, on real ranks: other numbers of ranks, failures, groups, and DCP's own files."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardproof as sp
from shardproof.errors import CorruptChunkError, NotCommittedError, RankFailure, StructureError
from shardproof.frameworks import dcp
from shardproof.maintenance import verify
from shardproof.storage import LocalStorage
from tests.distributed.fully_sharded import Model
from tests.distributed.test_state_fsdp import parallel, train
from tests.harness import Job, process_group, rank, reach, run_ranks, world_size

SECONDS = 120
BOUND = 20.0
"""Seconds in which a failure reaches every rank. The deadline on silence is 300."""


class Run:
    """A sharded model with the other objects of a training run."""

    def __init__(self, seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        self.model = Model(blocks=2)
        mesh = init_device_mesh("cpu", (world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        groups = [
            {"params": list(self.model.blocks.parameters()), "weight_decay": 0.25},
            {"params": [*self.model.embed.parameters(), *self.model.head.parameters()], "lr": 0.01},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1 / (seed + 1), betas=(0.5, 0.75 / (seed + 1)))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
        torch.manual_seed(1000 * seed + rank())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randint(17, (2, 5))).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        others = {"scheduler": self.scheduler, "scaler": self.scaler, "rng": sp.RandomState()}
        return {"model": model, "optim": optimizer, "step": step, **others}

    def load(self, path: str, load: Callable[..., None]) -> int:
        state = self.state(0)
        load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        return int(state["step"])

    def values(self) -> dict[str, Any]:
        """Everything, whole; the options of the optimizer by parameter."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        slots = {
            f"{key}.{slot}": value for key, of in optimizer["state"].items() for slot, value in of.items()
        }
        tensors = {**model, **slots}
        whole = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in tensors.items()
        }
        return {
            "tensors": {key: value.detach().clone() for key, value in whole.items()},
            "groups": optimizer["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
        }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tensors"].keys() == expected["tensors"].keys()
    for key, value in expected["tensors"].items():
        assert found["tensors"][key].dtype == value.dtype
        assert torch.equal(found["tensors"][key].view(-1), value.view(-1)), key
    assert torch.equal(found["rng"], expected["rng"])
    for name in ("groups", "scheduler", "scaler"):
        assert found[name] == expected[name], name


def save_with_a_late_mark(path: str, asynchronous: bool) -> bool:
    """Rank 0 pauses before it writes ``.metadata``. Returns whether the file exists when the save returns."""
    publish = LocalStorage.publish

    def late(storage: LocalStorage, name: str, *args: Any, **kwargs: Any) -> None:
        if name == ".metadata":
            reach("marking")
        publish(storage, name, *args, **kwargs)

    LocalStorage.publish = late  # type: ignore[method-assign]
    with process_group():
        state = {"w": torch.ones(4), f"of-{rank()}": torch.ones(2)}
        if asynchronous:
            dcp.async_save(state, checkpoint_id=path).result()
        else:
            dcp.save(state, checkpoint_id=path)
        is_marked = (Path(path) / ".metadata").exists()
        reach("returned")
        return is_marked


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_rank_returns_from_a_save_before_the_mark_exists(asynchronous: bool, tmp_path: Path) -> None:
    def script(job: Job) -> None:
        job.until_held(0, "marking")
        for _ in range(20):  # a rank that does not wait for rank 0 returns meanwhile
            if any("returned" in outcome.reached for outcome in job.outcomes):
                break
            job.pump(0.1)
        job.go(0)

    outcomes = run_ranks(
        2,
        save_with_a_late_mark,
        str(tmp_path / "step"),
        asynchronous,
        hold={0: "marking"},
        script=script,
        timeout=SECONDS,
    )
    assert [outcome.value for outcome in outcomes] == [True, True]


def train_and_be_killed(path: str) -> None:
    with process_group():
        run = Run(seed=3)
        run.train(3)
        torch.save(run.values(), f"{path}/expected-{rank()}.pt")
        dcp.save(run.state(3), checkpoint_id=f"{path}/step-3")
        run.train(1)
        dcp.async_save(run.state(4), checkpoint_id=f"{path}/step-4")
        reach("saving")


def resume(path: str, load: Callable[..., None] = dcp.load) -> int:
    with process_group():
        run = Run(seed=5)
        step = run.load(f"{path}/step-3", load)
        expected = torch.load(f"{path}/expected-{rank()}.pt", weights_only=False)  # noqa: TID251
        assert_same(run.values(), expected)
        run.train(1)
        return step


def test_three_ranks_are_killed_in_a_save_and_two_resume(tmp_path: Path) -> None:
    killed = run_ranks(
        3, train_and_be_killed, str(tmp_path), kill=dict.fromkeys(range(3), "saving"), timeout=SECONDS
    )
    assert [outcome.exit_code for outcome in killed] == [-9, -9, -9], killed[0].trace
    assert [outcome.value for outcome in run_ranks(2, resume, str(tmp_path), timeout=SECONDS)] == [3, 3]


def save_by_torch(path: str) -> None:
    with process_group():
        run = Run(seed=3)
        run.train(3)
        state = run.state(3)
        del state["rng"]  # DCP has one value for all ranks
        torch.save(run.values(), f"{path}/expected-{rank()}.pt")
        torch_dcp.save(state, checkpoint_id=f"{path}/step-3")


def load_from_torch(path: str) -> list[Any]:
    with process_group():
        run = Run(seed=5)
        state = run.state(0)
        with pytest.raises(sp.KeyMismatchError, match=r"nothing was changed(.|\n)*rng"):
            dcp.load(state, checkpoint_id=f"{path}/step-3")
        planner = torch_dcp.DefaultLoadPlanner(allow_partial_load=True)
        run.load(f"{path}/step-3", lambda *args, **kwargs: dcp.load(*args, planner=planner, **kwargs))
        expected = torch.load(f"{path}/expected-{rank()}.pt", weights_only=False)  # noqa: TID251
        assert_same(run.values(), expected | {"rng": torch.get_rng_state()})


def test_a_checkpoint_of_dcp_loads_on_two_ranks(tmp_path: Path) -> None:
    """`sp.RandomState` has a key that DCP's checkpoint lacks: an error, unless the planner allows it."""
    for outcome in run_ranks(3, save_by_torch, str(tmp_path), timeout=SECONDS):
        assert outcome.value is None
    for outcome in run_ranks(2, load_from_torch, str(tmp_path), timeout=SECONDS):
        assert outcome.value is None


def save_and_go_on(path: str) -> None:
    with process_group():
        run = Run(seed=3)
        run.train(3)
        torch.save(run.values(), f"{path}/expected-{rank()}.pt")
        future = dcp.async_save(run.state(3), checkpoint_id=f"{path}/step-3")
        run.train(2)  # writes to every tensor of the state dict
        assert isinstance(future, Future)
        assert wait([future], timeout=60).done == {future}
        assert future.result().location == f"{path}/step-3" and future.exception() is None


def test_training_goes_on_during_an_async_save(tmp_path: Path) -> None:
    for outcome in run_ranks(2, save_and_go_on, str(tmp_path), timeout=SECONDS):
        assert outcome.value is None
    assert [outcome.value for outcome in run_ranks(2, resume, str(tmp_path), timeout=SECONDS)] == [3, 3]


class Failing:
    """An object of the state dict that fails on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if rank() == 1:
            raise ValueError("the data loader lost its place")
        return {"place": 1}

    load_state_dict = state_dict


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of rank 1 cannot become larger than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Class and text of the error of a call, which comes in bounded time."""
    began = time.monotonic()
    try:
        call()
    except BaseException as error:  # torch's CheckpointException is no Exception
        assert time.monotonic() - began < BOUND
        return type(error).__name__, str(error)
    return "", ""


def fail_in_every_way(path: str) -> list[tuple[str, str]]:
    with process_group():
        run = Run(seed=3)
        run.train(1)
        state = run.state(1)
        errors = [error_of(lambda: dcp.save({**state, "data": Failing()}, checkpoint_id=f"{path}/a"))]
        errors += [error_of(lambda: dcp.async_save({**state, "data": Failing()}, checkpoint_id=f"{path}/b"))]
        odd = {**state, "odd": object() if rank() == 1 else 1}
        errors += [error_of(lambda: dcp.save(odd, checkpoint_id=f"{path}/c"))]
        with full_disk():
            errors += [error_of(lambda: dcp.save(state, checkpoint_id=f"{path}/d"))]
            future = dcp.async_save(state, checkpoint_id=f"{path}/e")
            errors += [error_of(future.result)]
            writer = dcp.ShardproofWriter(f"{path}/f")
            plain = {key: value for key, value in state.items() if key != "rng"}
            errors += [error_of(lambda: torch_dcp.save(plain, storage_writer=writer))]
        missing = f"{path}/nothing" if rank() == 1 else f"{path}/step-3"
        dcp.save({**state, "data": {"place": 1}}, checkpoint_id=f"{path}/step-3")
        errors += [error_of(lambda: dcp.load({**state, "data": Failing()}, checkpoint_id=f"{path}/step-3"))]
        errors += [error_of(lambda: dcp.load(state, checkpoint_id=missing))]
        dcp.load(state, checkpoint_id=f"{path}/step-3")
        torch_dcp.save(plain, storage_writer=dcp.ShardproofWriter(f"{path}/f"))
        return errors


def test_all_ranks_report_the_failure_of_one_rank_and_the_next_save_works(tmp_path: Path) -> None:
    outcomes = run_ranks(3, fail_in_every_way, str(tmp_path), timeout=60)
    by_rank = [outcome.value for outcome in outcomes]
    causes = [
        "lost its place",
        "lost its place",
        "object",
        "File too large",
        "File too large",
        "File too large",
    ]
    for errors in by_rank:
        for (_, text), cause in zip(errors, [*causes, "lost its place", "nothing"], strict=True):
            assert cause in text
    for errors in (by_rank[0], by_rank[2]):
        assert errors[0][0] == errors[1][0] == errors[6][0] == RankFailure.__name__
        assert errors[5][0] == "CheckpointException"
    assert by_rank[1][0][0] == "ValueError"
    for name in "abcde":
        with pytest.raises(NotCommittedError):
            sp.open(tmp_path / name)
    assert verify(LocalStorage(tmp_path / "f")).ok and verify(LocalStorage(tmp_path / "step-3")).ok


def save_mesh(path: str, kind: str) -> dict[str, Any]:
    with process_group():
        model = parallel(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 2)
        weights, slots = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": slots}
        dcp.save(state, checkpoint_id=f"{path}/ours")
        torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(f"{path}/torchs"))
        return {f"model.{key}": value.full_tensor().numpy() for key, value in weights.items()}


@pytest.mark.parametrize("kind", ["hsdp", "fsdp+tp"])
def test_two_dimensional_meshes(kind: str, tmp_path: Path) -> None:
    """Replicas are written once, and strided shards of tensor parallelism in their places."""
    weights = run_ranks(4, save_mesh, str(tmp_path), kind, timeout=SECONDS)[0].value
    with sp.open(tmp_path / "ours") as ours, sp.open(tmp_path / "torchs") as torchs:
        assert list(ours) == list(torchs) and len(ours) > 25
        for key in ours:
            if key in ours.objects:
                assert ours[key] == torchs[key]
            else:
                assert torch.equal(ours[key].read(), torchs[key].read())
        assert weights.keys() <= {*ours}
        for key, value in weights.items():
            assert (ours[key].read().numpy() == value).all()
    assert verify(LocalStorage(tmp_path / "torchs")).ok


def load_into_the_meta_device(path: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group():
        loaded: list[str] = []
        for load in (torch_dcp.load, dcp.load):
            with torch.device("meta"):
                model = torch.nn.Linear(3, 5)
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
            state = {"model": model.state_dict()}
            if load is torch_dcp.load:
                whole = torch.nn.Linear(3, 5).state_dict()
                dcp.save({"model": whole}, checkpoint_id=path) if rank() == 0 else dcp.save(
                    {}, checkpoint_id=path
                )
                load(state, storage_reader=dcp.ShardproofReader(path))
            else:
                load(state, checkpoint_id=path)
            model.load_state_dict(state["model"], assign=True)
            weight: Any = model.weight
            loaded.append(f"{weight.device} {tuple(weight.to_local().shape)} {weight.full_tensor().tolist()}")
        return loaded


def test_sharded_tensors_on_the_meta_device_get_memory_as_in_torch(tmp_path: Path) -> None:
    """The last rank has fewer rows."""
    for outcome in run_ranks(2, load_into_the_meta_device, str(tmp_path), timeout=SECONDS):
        by_torch, by_us = outcome.value
        assert by_torch == by_us and by_us.startswith(f"cpu ({3 - outcome.rank}, 3) ")


def save_sharded_tensor(path: str) -> None:
    """Rows 0 and 1 are on rank 0, and the others on rank 1. FSDP1 gives such tensors."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    with process_group():
        whole = torch.arange(20.0).view(5, 4)
        rows = slice(0, 2) if rank() == 0 else slice(2, 5)

        def sharded(values: torch.Tensor) -> Any:
            offsets = [rows.start, 0]
            return init_from_local_shards([Shard.from_tensor_and_offsets(values, offsets, rank())], 5, 4)

        dcp.save({"model": {"w": sharded(whole[rows].clone())}}, checkpoint_id=path)
        target = sharded(torch.zeros_like(whole[rows]))
        dcp.load({"model": {"w": target}}, checkpoint_id=path)
        assert torch.equal(target.local_shards()[0].tensor, whole[rows])


def test_sharded_tensors(tmp_path: Path) -> None:
    for outcome in run_ranks(2, save_sharded_tensor, str(tmp_path), timeout=SECONDS):
        assert outcome.value is None
    with sp.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["model.w"].read(), torch.arange(20.0).view(5, 4))


def save_in_a_group(path: str) -> str:
    with process_group():
        group = dist.new_group([1, 2])
        tensor = torch.full((4,), float(rank()))
        if rank() == 0:
            return error_of(lambda: dcp.save({"w": tensor}, checkpoint_id=path, process_group=group))[0]
        own = {"w": tensor - tensor, f"of-{rank()}": tensor}
        dcp.save(own, checkpoint_id=path, process_group=group)
        future = dcp.async_save(own, checkpoint_id=f"{path}-async", process_group=group)
        future.result()
        target = {"w": torch.ones(4), f"of-{rank()}": torch.zeros(4)}
        dcp.load(target, checkpoint_id=path, process_group=group)
        assert torch.equal(target[f"of-{rank()}"], tensor)
        alone = f"{path}-{rank()}"
        dcp.save({"w": tensor}, checkpoint_id=alone, no_dist=True)
        assert torch.equal(sp.open(alone)["w"].read(), tensor)
        return ""


def test_the_ranks_of_a_process_group_save_without_the_others(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    outcomes = run_ranks(3, save_in_a_group, path, timeout=SECONDS)
    assert [outcome.value for outcome in outcomes] == [StructureError.__name__, "", ""]
    for name in (path, f"{path}-async"):
        with sp.open(name) as checkpoint:
            assert list(checkpoint) == ["of-1", "of-2", "w"] and checkpoint.world_size == 2


def save_in_a_group_that_fails(path: str) -> list[str]:
    """Ranks 1 and 2 save in the background, and do not ask for the result."""
    with process_group():
        group = dist.new_group([1, 2])
        tensor = torch.ones(4)
        with full_disk():
            if rank() > 0:
                dcp.async_save({"w": tensor}, checkpoint_id=f"{path}/group", process_group=group)
            text = error_of(lambda: dcp.save({"w": tensor}, checkpoint_id=f"{path}/all"))[1]
        dcp.save({"w": tensor}, checkpoint_id=f"{path}/all")
        return [text]


def test_a_save_of_all_ranks_reports_the_failed_save_of_a_group(tmp_path: Path) -> None:
    for outcome in run_ranks(3, save_in_a_group_that_fails, str(tmp_path), timeout=SECONDS):
        assert f"{tmp_path}/group" in outcome.value[0]
    assert sp.open(tmp_path / "all")["w"].read().all()


def save_by_writer(path: str) -> None:
    with process_group():
        run = Run(seed=3)
        run.train(3)
        state = run.state(3)
        del state["rng"]
        state["large"] = torch.arange(5 << 20).view(5, -1)  # 40 MiB: several chunks of many blocks
        torch.save(run.values(), f"{path}/expected-{rank()}.pt")
        torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(f"{path}/step-3"))


def load_by_reader(path: str) -> None:
    def load(state: dict[str, Any], checkpoint_id: str) -> None:
        del state["rng"]
        state["large"] = torch.zeros(5, 1 << 20, dtype=torch.int64)
        torch_dcp.load(state, storage_reader=dcp.ShardproofReader(checkpoint_id))
        assert torch.equal(state["large"], torch.arange(5 << 20).view(5, -1))

    with process_group():
        run = Run(seed=5)
        assert run.load(f"{path}/step-3", load) == 3
        expected = torch.load(f"{path}/expected-{rank()}.pt", weights_only=False)  # noqa: TID251
        assert_same(run.values(), expected | {"rng": torch.get_rng_state()})


def load_damaged(path: str) -> str:
    with process_group():
        state = {"large": torch.zeros(5, 1 << 20, dtype=torch.int64)} if rank() == 0 else {}
        reader = dcp.ShardproofReader(f"{path}/step-3")
        return error_of(lambda: torch_dcp.load(state, storage_reader=reader))[1]


def test_torch_saves_and_loads_through_the_storage_classes(tmp_path: Path) -> None:
    for outcome in run_ranks(3, save_by_writer, str(tmp_path), timeout=SECONDS):
        assert outcome.value is None
    step = tmp_path / "step-3"
    assert len(list((step / "shards").iterdir())) == 3
    report = verify(LocalStorage(step))
    assert report.ok and report.chunks > 60
    assert sp.open(step)["large"][4, -1] == (5 << 20) - 1
    for outcome in run_ranks(2, load_by_reader, str(tmp_path), timeout=SECONDS):
        assert outcome.value is None
    large = max((step / "shards").iterdir(), key=lambda file: file.stat().st_size)
    with open(large, "r+b") as file:
        file.seek(large.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert [type(fault) for fault in verify(LocalStorage(step)).faults] == [CorruptChunkError]
    for outcome in run_ranks(2, load_damaged, str(tmp_path), timeout=SECONDS):
        assert "CorruptChunkError" in outcome.value and "large" in outcome.value


def save_killed(path: str) -> None:
    with process_group():
        state = {"w": torch.ones(4), f"of-{rank()}": torch.full((64,), float(rank()))}

        class Writer(dcp.ShardproofWriter):
            def write_data(self, plan: Any, planner: Any) -> Any:
                if rank() == 1:
                    reach("writing")
                return super().write_data(plan, planner)

        torch_dcp.save(state, storage_writer=Writer(path))


def test_a_rank_that_dies_while_torch_saves_leaves_nothing_committed(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    outcomes = run_ranks(3, save_killed, path, kill={1: "writing"}, timeout=SECONDS)
    assert outcomes[1].exit_code == -9
    assert outcomes[0].error is not None and outcomes[2].error is not None
    with pytest.raises(NotCommittedError):
        sp.open(path)
