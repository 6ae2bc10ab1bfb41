"""Trains a small GPT of Megatron-Core, and loads and saves it: `megatron_train.py STEPS LAYOUT [OPTIONS]`.

STEPS is a JSON list of what to do, in order:

    ["load", PATH]       fill model and optimizer with `shardproof.frameworks.megatron_core`
    ["train", N]         take N steps
    ["save", PATH]       save with `shardproof.frameworks.megatron_core`
    ["save_live", PATH]  save with `live_state`; "load_live" loads so. Neither may run a collective
    ["queue", PATH]      save through Megatron's queue of asynchronous calls
    ["nvrx", PATH]       the same with requests of nvidia-resiliency-ext
    ["begin", PATH]      save in the background, train a step meanwhile, and wait
    ["reference", PATH]  save with Megatron's own strategy `torch_dist`
    ["own", PATH]        fill model and optimizer with Megatron's own functions and strategy
    ["refuse", PATH]     make `live_state` of optimizers whose state it does not know; the errors are facts
    ["bare", PATH]       save optimizer and model as values of a state tree; the errors are facts
    ["sharded", PATH]    save and load the sharded state dict of the model alone
    ["per_rank", PATH]   the same with the model, and with its state dict, for each rank by itself
    ["replicas", PATH]   save and load it by the ranks with the same part; the error of other ranks is a fact
    ["mixed", PATH]      save the model with torch's `dcp.save`; the names with other bits are a fact
    ["copies", PATH]     save copies of the model's tensors, and compare replicas; differing keys are a fact
    ["declared", PATH]   save the model as a value of a state tree, with its parts declared
    ["by_torch", PATH]   save the optimizer as an object in a state dict, with torch's `dcp.save`
    ["refused", PATH]    load what does not fit; the error is a fact
    ["describe", KIND]   describe the optimizer in a sharding type; the error is a fact
    ["reject", REASON]   have the rerun state machine reject a result of the last rank, and ask for a rerun
    ["remember", PATH]   each rank writes its scheduler, random state and rerun state, for a comparison
    ["killed", PATH]     save, and kill the last rank while it writes

LAYOUT is a JSON dict of `initialize_model_parallel`, with `kind`, the sharding type of the optimizer. OPTIONS
is one of `TransformerConfig`. Its `whole` adds what Megatron-LM saves beside model and optimizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_gpt
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from collective_count import without_collectives
from megatron.core import dist_checkpointing as mcore
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.distributed import TorchFullyShardedDataParallel, torch_fully_sharded_data_parallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from peer_result import Result, join_ranks_on_devices, leave_ranks, rank, world_size
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardproof as sp
from shardproof.frameworks import dcp
from shardproof.frameworks import megatron_core as ours


class LoopState:
    """The state that Megatron-LM saves beside model and optimizer: scheduler, random state, rerun machine."""

    def __init__(self) -> None:
        initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
        self.machine = get_rerun_state_machine()
        self.batches = RerunDataIterator(iter([torch.full((2,), float(rank())) for _ in range(9)]))

    def attach(self, optimizer: Any) -> None:
        self.scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=2e-2,
            min_lr=1e-4,
            lr_warmup_steps=2,
            lr_decay_steps=10,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.1,
            wd_incr_steps=10,
            wd_incr_style="linear",
        )
        random.seed(100 + rank())
        np.random.seed(100 + rank())

    def step(self) -> None:
        self.scheduler.step(1)
        random.random(), np.random.rand(), torch.rand(1)

    def reject(self, reason: str) -> None:
        """A result of the last rank is rejected, and found again when the step is run again."""
        machine = self.machine
        machine.should_checkpoint_and_exit()
        while machine.should_run_forward_backward(self.batches):
            result = next(self.batches).sum()
            machine.validate_result(result, lambda _: rank() == world_size() - 1, reason)
        assert machine.should_checkpoint_and_exit()[0], machine.state

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        return {
            "opt_param_scheduler": self.scheduler.state_dict(),
            "rng_state": ShardedObject(
                "rng_state",
                [_random_state()],
                (
                    parallel_state.get_pipeline_model_parallel_world_size(),
                    parallel_state.get_tensor_model_parallel_world_size(),
                ),
                (
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_tensor_model_parallel_rank(),
                ),
                replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
            ),
            "rerun_state_machine": self.machine.state_dict(self.batches, "torch_dist", force=is_loading),
        }

    def asked(self, layout: list[int]) -> dict[str, Any]:
        """The state to load. As in Megatron-LM, another layout loads no reruns and maybe no random state."""
        state = self.state(is_loading=True)
        if layout != layout_here():
            del state["rerun_state_machine"]
        if layout[:2] != layout_here()[:2]:
            del state["rng_state"]
        return state

    def set(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        if "sharded" in state.get("rerun_state_machine", {}):
            self.machine.load_state_dict(state["rerun_state_machine"])
        if "rng_state" in state:
            (found,) = state["rng_state"]
            random.setstate(found["random_rng_state"])
            np.random.set_state(found["np_rng_state"])
            torch.set_rng_state(found["torch_rng_state"])
            tensor_parallel.get_cuda_rng_tracker().set_states(found["rng_tracker_states"])

    def remembered(self) -> dict[str, Any]:
        machine = self.machine.state_dict(self.batches, "torch_dist", force=True)
        batches = self.machine.data_iterator_checkpoints or [self.batches.state_dict()]
        sharded = machine.pop("sharded").data | {"data_iterator_checkpoints": batches}
        return {
            "scheduler": _described(self.scheduler.state_dict()),
            "random": _described(_random_state()),
            "rerun": _described(machine | sharded),
        }


class ModelState:
    """An object with the state of a model, as programs of torch's DCP have one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["inner"])


class Steps:
    """One run of the script."""

    def __init__(self, layout: dict[str, Any], options: dict[str, Any]) -> None:
        self.kind = layout.pop("kind", "fully_reshardable")
        self.loop_state = LoopState() if options.pop("whole", False) else None
        self.run = megatron_gpt.Run(layout, options.pop("seed", 0), options)
        self.strategy = ours.SaveStrategy(deadline=60)
        self.done = 0
        self.errors: dict[str, str] = {}
        self.other: list[list[str]] = []
        self.differing: list[str] = []
        if self.loop_state is not None:
            self.loop_state.attach(self.run.optimizer)

    def state(self, *, is_loading: bool = False) -> dict[str, Any]:
        return megatron_gpt.sharded_state(self.run, self.kind, is_loading=is_loading) | {"step": self.done}

    def load(self, path: str, load: Any = ours.load) -> None:
        state = self.state(is_loading=True)
        if self.loop_state is not None:
            state |= self.loop_state.asked(ours.load_content_metadata(path)["layout"])
        state = load(state, path)
        for at, chunk in enumerate(self.run.chunks):
            chunk.module.load_state_dict(state["model" if len(self.run.chunks) == 1 else f"model{at}"])
        self.run.optimizer.load_state_dict(state["optimizer"])
        self.done = state["step"]
        if self.loop_state is not None:
            self.loop_state.set(state)

    def own(self, path: str) -> None:
        self.load(path, mcore.load)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.run.train(1, self.done)
            self.done += 1
            if self.loop_state is not None:
                self.loop_state.step()

    def save(self, path: str) -> None:
        state = self.state()
        if self.loop_state is not None:
            state |= self.loop_state.state()
        ours.save(state, path, self.strategy, content_metadata={"kind": self.kind, "layout": layout_here()})

    def killed(self, path: str) -> None:
        def kill(event: Any) -> None:
            if rank() == world_size() - 1 and event.phase == "write":
                os.kill(os.getpid(), signal.SIGKILL)

        sp.events.subscribe(kill)
        self.save(path)

    def reject(self, reason: str) -> None:
        self.loop_state.reject(reason)

    def remember(self, path: str) -> None:
        Path(path).mkdir(exist_ok=True)
        (Path(path) / f"rank-{rank()}.json").write_text(json.dumps(self.loop_state.remembered()))

    def bare(self, path: str) -> None:
        module, optimizer = self.run.model.module, self.run.optimizer
        values = {
            "itself": optimizer,
            "named": sp.OptimizerState(optimizer, module),
            "model": module,
            "state_dict": module.state_dict(),
            "kept": module.state_dict(keep_vars=True),
            "chosen": list(module.state_dict().values()),
            "object": ModelState(module),
        }
        saves = {
            name: partial(sp.save, f"{path}-{name}", {name: value}, deadline=60)
            for name, value in values.items()
        }
        for name in ("model", "state_dict", "kept", "object"):
            saves[f"dcp_{name}"] = partial(dcp.save, {name: values[name]}, checkpoint_id=f"{path}-dcp-{name}")
        written = {"storage_writer": dcp.ShardproofWriter(f"{path}-torch")}
        saves["torch"] = partial(torch_dcp.save, {"torch": module.state_dict()}, **written)
        saves["dcp"] = partial(dcp.save, {"optimizer": optimizer}, checkpoint_id=f"{path}-dcp")
        alone = {"rendezvous": sp.rendezvous.LocalRendezvous()}
        saves["alone"] = partial(sp.save, f"{path}-alone-{rank()}", {"model": module}, **alone)
        saves["dcp_alone"] = partial(
            dcp.save, {"model": module}, checkpoint_id=f"{path}-dcp-{rank()}", no_dist=True
        )
        for name, save in saves.items():
            try:
                save()
            except (sp.ShardproofError, CheckpointException) as error:
                self.errors[name] = f"{type(error).__name__}: {error}"

    def sharded(self, path: str) -> None:
        module = self.run.model.module
        with self.comes_back():
            ours.save({"model": module.sharded_state_dict()}, path)
            self.clear()
            loaded = ours.load({"model": module.sharded_state_dict()}, path)
            module.load_state_dict(loaded["model"])

    def per_rank(self, path: str) -> None:
        module = self.run.model.module
        with self.comes_back():
            sp.save(path, {"model": sp.PerRank(module)}, deadline=60)
            self.clear()
            sp.load(path, {"model": sp.PerRank(module)}, deadline=60)
        with self.comes_back():
            dcp.save({"model": sp.PerRank(module.state_dict())}, checkpoint_id=f"{path}-dcp")
            self.clear()
            dcp.load({"model": sp.PerRank(module.state_dict())}, checkpoint_id=f"{path}-dcp")

    def replicas(self, path: str) -> None:
        module = self.run.model.module
        same = {"process_group": parallel_state.get_data_parallel_group()}
        own = f"{path}-{parallel_state.get_tensor_model_parallel_rank()}"
        for kind, value in {"model": module, "state_dict": module.state_dict()}.items():
            with self.comes_back():
                dcp.save({"model": value}, checkpoint_id=f"{own}-{kind}", **same)
                self.clear()
                dcp.load({"model": value}, checkpoint_id=f"{own}-{kind}", **same)
        state = {"model": module.state_dict()}
        with self.comes_back():
            torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(f"{own}-torch"), **same)
            self.clear()
            torch_dcp.load(state, storage_reader=dcp.ShardproofReader(f"{own}-torch"), **same)
        other = {"process_group": parallel_state.get_tensor_model_parallel_group()}
        at = f"{path}-of-{parallel_state.get_data_parallel_rank()}"
        stored = f"{path}-0-state_dict"
        for kind, call, options in (
            ("saved", dcp.save, {"checkpoint_id": at}),
            ("loaded", dcp.load, {"checkpoint_id": stored}),
            ("torch_saved", torch_dcp.save, {"storage_writer": dcp.ShardproofWriter(f"{at}-torch")}),
            ("torch_loaded", torch_dcp.load, {"storage_reader": dcp.ShardproofReader(stored)}),
        ):
            try:
                call({"model": module.state_dict()}, **options, **other)
            except (sp.ShardproofError, CheckpointException) as error:
                self.errors[kind] = str(error)
        mesh = DeviceMesh.from_group(same["process_group"], "cpu")  # Megatron-Core makes one of "cuda"
        with patch.object(torch_fully_sharded_data_parallel.DeviceMesh, "from_group", lambda *_: mesh):
            self.run.config.transformer_impl = "local"
            TorchFullyShardedDataParallel(self.run.config, self.run.model.ddp_config, module)
        assert all(isinstance(item, DTensor) for item in module.parameters())
        with self.comes_back():
            dcp.save({"model": module}, checkpoint_id=f"{own}-fsdp2", **same)
            self.clear()
            dcp.load({"model": module}, checkpoint_id=f"{own}-fsdp2", **same)
        try:
            sp.save(f"{path}-all", {"model": module}, deadline=60)
        except sp.ShardproofError as error:
            self.errors["fsdp2"] = str(error)

    def mixed(self, path: str) -> None:
        module = self.run.model.module
        torch_dcp.save({"model": module}, checkpoint_id=path)
        state = module.state_dict()
        with sp.open(path) as checkpoint:
            other = [
                name
                for name, item in state.items()
                if torch.is_tensor(item) and not torch.equal(checkpoint[f"model.{name}"].read(), item)
            ]
        self.other = [[] for _ in range(world_size())]
        dist.all_gather_object(self.other, other)

    def copies(self, path: str) -> None:
        copies = {name: item.clone() for name, item in self.run.model.module.named_parameters()}
        checkpointer = sp.Checkpointer(path, check_replicas="all", deadline=60)
        result = checkpointer.save(1, {"model": copies}).result()
        self.differing = sorted({item.key for item in result.diverged})

    def clear(self) -> None:
        with torch.no_grad():
            for parameter in self.run.model.module.parameters():
                parameter.fill_(7)

    @contextmanager
    def comes_back(self) -> Iterator[None]:
        """Fails unless the model has the same bits at the end of the block."""
        before = {name: item.clone() for name, item in self.run.model.module.named_parameters()}
        yield
        for name, item in self.run.model.module.named_parameters():
            assert torch.equal(item, before[name]), name

    def by_torch(self, path: str) -> None:
        torch_dcp.save({"optimizer": self.run.optimizer}, checkpoint_id=path)

    def declared(self, path: str) -> None:
        megatron_gpt.declare(self.run.model.module)
        sp.save(path, {"model": self.run.model.module}, deadline=60)
        module = self.run.model.module
        calls = {
            "dcp_declared": partial(dcp.save, {"model": module}, checkpoint_id=f"{path}-dcp"),
            "loaded": partial(sp.load, path, {"model": module.state_dict()}, deadline=60),
        }
        for name, call in calls.items():
            try:
                call()
            except sp.ShardproofError as error:
                self.errors[name] = str(error)

    def refused(self, path: str) -> None:
        try:
            self.load(path)
        except sp.ShardproofError as error:
            self.errors["refused"] = f"{type(error).__name__}: {error}"

    def describe(self, kind: str) -> None:
        try:
            megatron_gpt.sharded_state(self.run, kind)
        except CheckpointingException as error:
            self.errors[kind] = str(error)

    def save_live(self, path: str) -> None:
        with without_collectives():
            state = ours.live_state(self.run.chunks, self.run.optimizer) | {"step": self.done}
            ours.save(state, path, self.strategy)

    def load_live(self, path: str) -> None:
        optimizer = self.run.optimizer
        chunks = [chunk.module for chunk in self.run.chunks]  # the wrappers make no difference
        module = chunks if len(chunks) > 1 else chunks[0]
        with without_collectives():
            state = ours.live_state(module, optimizer, checkpoint_dir=path)
            self.done = ours.load_live_state(module, optimizer, state, path)["step"]

    def queue(self, path: str, async_strategy: str = "mcore") -> None:
        queue = AsyncCallsQueue()
        options = {"async_sharded_save": True, "async_strategy": async_strategy}
        queue.schedule_async_request(ours.save(self.state(), path, self.strategy, **options))
        self.run.train(1, 100)
        queue.maybe_finalize_async_calls(blocking=True)

    def nvrx(self, path: str) -> None:
        self.queue(path, "nvrx")

    def begin(self, path: str) -> None:
        pending = ours.begin_save(self.state(), path, self.strategy)
        self.run.train(1, 100)
        pending.result()

    def reference(self, path: str) -> None:
        if rank() == 0:
            Path(path).mkdir()
        dist.barrier()
        mcore.save(megatron_gpt.sharded_state(self.run, "fully_reshardable") | {"step": self.done}, path)

    def refuse(self, path: str) -> None:
        """Changes Megatron's own optimizer as its options do, whose packages are not installed."""
        module, chained = self.run.model.module, self.run.optimizer
        (optimizer,) = getattr(chained, "chained_optimizers", [chained])
        fused = optimizer.optimizer

        def error(of: str, call: Any = lambda: ours.live_state(module, chained)) -> None:
            try:
                call()
            except sp.StructureError as refused:
                self.errors[of] = str(refused)

        error("no_chunk", partial(ours.live_state, [], chained))
        state = ours.live_state([module], chained)
        error("chunks", partial(ours.load_live_state, [module, module], chained, state, "absent"))
        optimizer.config.use_precision_aware_optimizer = True
        error("precision_aware")
        optimizer.config.use_precision_aware_optimizer = False
        for state in fused.state.values():
            state["master_param"] = torch.zeros(1)
        error("slot")
        for state in fused.state.values():
            del state["master_param"]
        optimizer.optimizer = torch.optim.AdamW(fused.param_groups)
        for group in optimizer.optimizer.param_groups:
            for number, main in enumerate(group["params"]):
                optimizer.optimizer.state[main]["step"] = torch.tensor(float(number))
        error("steps")
        optimizer.optimizer = fused
        ours.live_state(module, chained)
        of_dense, of_experts = optimizer.state_dict(), optimizer.state_dict()
        of_experts["optimizer"]["param_groups"][0]["lr"] = 7.0
        try:
            ours.load_optimizer_state(chained, {0: of_dense, 1: of_experts})
        except sp.StructureError as refused:
            self.errors["options"] = str(refused)


def layout_here() -> list[int]:
    """Tensor and pipeline parallel sizes, and all ranks."""
    return [
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        world_size(),
    ]


def _random_state() -> dict[str, Any]:
    """As Megatron-LM's `get_rng_state`."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _described(value: Any) -> Any:
    """Values and their types as JSON, and long ones as their digest."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return [kind, str(value.dtype), *_described(value.reshape(-1).tolist())]
    if isinstance(value, list | tuple) and len(value) > 32:
        return [kind, hashlib.sha256(repr(value).encode()).hexdigest()]
    return [kind, *map(_described, value)] if isinstance(value, list | tuple) else repr(value)


def main() -> None:
    steps, layout, *options = map(json.loads, sys.argv[1:])
    join_ranks_on_devices()
    it = Steps(layout, options[0] if options else {})
    for name, argument in steps:
        getattr(it, name)(argument)
    result = Result()
    result.facts["version"] = version("megatron-core")
    result.facts["errors"] = it.errors
    result.facts["other"] = it.other
    result.facts["differing"] = it.differing
    leave_ranks(result)


if __name__ == "__main__":
    main()
