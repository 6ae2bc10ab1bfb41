"""Tensors outside of modules that are parts of a model, as `shardproof.layouts` declares on the modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardproof as sp
from shardproof import layouts
from shardproof.frameworks import dcp
from tests.harness import process_group, rank, run_ranks, world_size

GATE, UP = torch.arange(8.0).reshape(4, 2), torch.arange(8.0, 16.0).reshape(4, 2)


def trained() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    """This rank's part of [gate; up], and weights that all ranks have, with a stepped optimizer."""
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 4, bias=False), "norm": torch.nn.LayerNorm(2)})
    half = slice(2 * rank(), 2 * rank() + 2)
    with torch.no_grad():
        model["fc"].weight.copy_(torch.cat([GATE[half], UP[half]]))  # type: ignore[operator]
    layouts.swiglu(model, "fc.weight", 4, rank=rank(), ranks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def message_of(call: Any, *arguments: Any, **options: Any) -> str:
    """The text of the error that a call raises on this rank."""
    try:
        call(*arguments, **options)
    except (sp.ShardproofError, CheckpointException) as error:
        return str(error)
    return ""


def saved_in_all_ways(folder: str) -> dict[str, str]:
    """The errors of this rank, by what it does."""
    with process_group():
        model, optimizer = trained()
        loose = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        errors = {
            "save": message_of(sp.save, f"{folder}/a", loose),
            "slots": message_of(sp.save, f"{folder}/b", {"optimizer": loose["optimizer"]}),
            "adapter": message_of(dcp.save, loose, checkpoint_id=f"{folder}/c"),
            "torch": message_of(torch_dcp.save, loose, storage_writer=dcp.ShardproofWriter(f"{folder}/d")),
        }
        wide = torch.nn.Linear(32, 64)
        layouts.fused(wide, "weight", [128], rank=rank(), ranks=2)
        array = {"array": wide.weight.detach().numpy()}
        writer = dcp.ShardproofWriter(f"{folder}/f")
        errors["array"] = message_of(torch_dcp.save, array, storage_writer=writer)
        stage = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        layouts.layers(
            stage, rank()
        )  # the names of rank 0 are those in the model, and torch keeps its values
        errors["stages"] = message_of(
            torch_dcp.save,
            {"stage": stage.state_dict()},
            storage_writer=dcp.ShardproofWriter(f"{folder}/e"),
            planner=torch_dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        )
        sp.save(f"{folder}/whole", {"model": model, "optimizer": optimizer})  # what the error says
        own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        sp.save(f"{folder}/own", {"all": sp.PerRank(own)})
        reader = dcp.ShardproofReader(f"{folder}/lossy")
        if rank() == 0:  # as before the check: the part of one rank, for all
            sp.save(
                f"{folder}/lossy", {"model": model.state_dict()}, rendezvous=sp.rendezvous.LocalRendezvous()
            )
        dist.barrier()
        before = model["fc"].weight.detach().clone()  # type: ignore[operator]
        errors["load"] = message_of(sp.load, f"{folder}/lossy", {"model": model.state_dict()})
        errors["torch load"] = message_of(
            torch_dcp.load, {"model": model.state_dict()}, storage_reader=reader
        )
        assert torch.equal(model["fc"].weight, before)  # type: ignore[arg-type]
        for path, state in (
            ("whole", {"model": model, "optimizer": optimizer}),
            ("own", {"all": sp.PerRank(own)}),
        ):
            with torch.no_grad():
                model["fc"].weight.zero_()  # type: ignore[operator]
                optimizer.state[model["fc"].weight]["momentum_buffer"].zero_()  # type: ignore[index]
            sp.load(f"{folder}/{path}", state)
            slot = optimizer.state[model["fc"].weight]["momentum_buffer"]  # type: ignore[index]
            assert torch.equal(model["fc"].weight, before) and torch.equal(slot, before)  # type: ignore[arg-type]
        return errors


def test_parts_outside_of_their_module_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """And nothing is committed. The error's advice stores the parts of all ranks."""
    outcomes = run_ranks(2, saved_in_all_ways, str(tmp_path), timeout=100)
    for outcome in outcomes:
        for way, message in outcome.value.items():
            keys = {"slots": "optimizer.state.0.momentum_buffer", "stages": "stage.0.weight"}
            keys["array"] = "array.@data"  # torch takes it for an object
            key = keys.get(way, "model.fc.weight")
            assert f"{key} is this rank's part of a model: shardproof.layouts declares it" in message, way
            assert "{'model': model, 'optimizer': optimizer}" in message and "shardproof.PerRank" in message
    assert {path.parent.name for path in tmp_path.glob("*/manifest.json")} == {"whole", "own", "lossy"}
    with sp.open(tmp_path / "whole") as checkpoint:
        for key in ("model.fc.weight", "optimizer.fc.weight.momentum_buffer"):
            assert torch.equal(checkpoint[key].read(), torch.cat([GATE, UP]))


def saved_replicas(folder: str) -> list[str]:
    """Saves loose states that have no part, in a process that has declared parts."""
    with process_group():
        trained()
        torch.manual_seed(0)
        copy, sharded = (torch.nn.Linear(2, 4) for _ in range(2))
        sharded.load_state_dict(copy.state_dict())
        fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size(),)))
        for name, model in (("copy", copy), ("sharded", sharded)):
            optimizer = torch.optim.AdamW(model.parameters())
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            sp.save(f"{folder}/{name}-a", state)
            torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(f"{folder}/{name}-b"))
            sp.load(f"{folder}/{name}-a", state)
            torch_dcp.load(state, storage_reader=dcp.ShardproofReader(f"{folder}/{name}-b"))
        whole = trained()[0]  # a DTensor on all ranks describes the part of each
        mesh = init_device_mesh("cpu", (world_size(),))
        local = whole["fc"].weight.detach()  # type: ignore[operator]
        state = {"fc": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
        sp.save(f"{folder}/dtensor-a", state)
        torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(f"{folder}/dtensor-b"))
        for name in "ab":
            local.zero_()
            torch_dcp.load(state, storage_reader=dcp.ShardproofReader(f"{folder}/dtensor-{name}"))
            assert torch.equal(local[:2], GATE[2 * rank() : 2 * rank() + 2])
            sp.load(f"{folder}/dtensor-{name}", state)
        one = dist.new_group([0]), dist.new_group([1])
        part = {"model": trained()[0].state_dict()}  # a rank that saves alone
        writer = dcp.ShardproofWriter(f"{folder}/alone-{rank()}")
        torch_dcp.save(part, storage_writer=writer, process_group=one[rank()])
        torch_dcp.load(
            part, storage_reader=dcp.ShardproofReader(f"{folder}/alone-{rank()}"), process_group=one[rank()]
        )
        return sorted(copy.state_dict())


def test_replicas_and_dtensors_are_saved(tmp_path: Path) -> None:
    outcomes = run_ranks(2, saved_replicas, str(tmp_path), timeout=100)
    weights = []
    for name in ("copy-a", "copy-b", "sharded-a", "sharded-b"):
        with sp.open(tmp_path / name) as checkpoint:
            weights.append([checkpoint[f"model.{key}"].read() for key in outcomes[0].value])
    assert all(torch.equal(*pair) for other in weights[1:] for pair in zip(weights[0], other, strict=True))
    for number in range(2):
        with sp.open(tmp_path / f"alone-{number}") as checkpoint:
            assert torch.equal(checkpoint["model.fc.weight"].read()[:2], GATE[2 * number : 2 * number + 2])


def saved_under_other_names(folder: str) -> str:
    """Saves the layer of this rank under keys with its number in the model; the error for the stage's own."""
    with process_group():
        stage = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])})
        with torch.no_grad():
            stage["layers"][0].weight.fill_(rank() + 1)  # type: ignore[index]
        layouts.layers(stage["layers"], rank())  # type: ignore[arg-type]
        value = stage.state_dict()["layers.0.weight"]
        at = f"model.layers.{rank()}"
        state = {
            f"{at}.self_attn.q_proj.weight": value,
            f"{at}.attn.q.weight": value[:1],
            f"{at}._orig_mod.weight": value,
            f"{at}._checkpoint_wrapped_module.weight": value,
        }
        sp.save(f"{folder}/a", state)
        torch_dcp.save(state, storage_writer=dcp.ShardproofWriter(f"{folder}/b"))
        value.zero_()
        sp.load(f"{folder}/a", state)
        assert bool((value == rank() + 1).all())
        return message_of(sp.save, f"{folder}/c", {"model.layers.0.self_attn.q_proj.weight": value})


def test_other_names_with_the_numbers_of_the_model_are_saved(tmp_path: Path) -> None:
    for outcome in run_ranks(2, saved_under_other_names, str(tmp_path), timeout=100):
        assert "model.layers.0.self_attn.q_proj.weight is this rank's part of a model" in outcome.value
    for name in "ab":
        with sp.open(tmp_path / name) as checkpoint:
            assert len(checkpoint) == 8
            for number in range(2):
                for end in ("self_attn.q_proj.weight", "attn.q.weight"):
                    assert bool((checkpoint[f"model.layers.{number}.{end}"].read() == number + 1).all())
