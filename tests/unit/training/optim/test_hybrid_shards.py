"""The hybrid optimizer over shards: FSDP2 on real ranks, some of which have empty shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardproof as sp
from shardproof.engine.state.optimizer.slots import MASTER
from shardproof.optim import HybridDeviceOptimizer
from tests.harness import process_group, rank, run_ranks

SIZES = ((5, 3), (3, 1), (1, 2))


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Weights of 3, 1 and 2 rows, biases likewise: on the second of two ranks some shards are empty."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*[torch.nn.Linear(inner, outer) for inner, outer in SIZES]).to(dtype)
    model.unused = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    return model


def sharded(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = network(dtype)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if dtype == torch.bfloat16
        else MixedPrecisionPolicy()
    )
    for layer in model.children():
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batch = torch.randn(4, 5, generator=generator).to(next(model.parameters()).dtype)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hybrid(model: torch.nn.Module, fraction: float, **options: Any) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(
        model.parameters(), torch.optim.AdamW, cpu_fraction=fraction, lr=0.02, fused=True, **options
    )


def locals_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [weight.to_local().clone() for weight in model.parameters()]  # type: ignore[attr-defined]


def steps_over_fsdp2() -> dict[str, Any]:
    with process_group():
        plain_model = sharded()
        expected = run(plain_model, torch.optim.AdamW(plain_model.parameters(), lr=0.02, fused=True), 0, 4)
        for fraction in (0.0, 0.5, 1.0):
            model = sharded()
            optimizer = hybrid(model, fraction)
            assert run(model, optimizer, 0, 4) == expected
            assert all(map(torch.equal, locals_of(model), locals_of(plain_model)))
        narrow = sharded(torch.bfloat16)
        masters = hybrid(narrow, 0.5, master_dtype=torch.float32)
        before = [sorted(slots.tensors) for slots in masters.describe_slots()]
        run(narrow, masters, 0, 1)
        if rank() == 1:  # one rank alone: describe_slots runs no collective
            list(masters.describe_slots())
        described = {
            name: {
                slot: (tuple(item.shape), item.dtype)
                for slot, item in slots.tensors.items()  # type: ignore[union-attr]
            }
            for (name, _), slots in zip(narrow.named_parameters(), masters.describe_slots(), strict=True)
        }
        sides = [masters.is_on_cpu(weight) for weight in narrow.parameters()]
        return {"before": before, "described": described, "sides": sides}


def test_steps_of_fsdp2_shards_equal_torchs_and_empty_shards_have_slots() -> None:
    first, second = (outcome.value for outcome in run_ranks(2, steps_over_fsdp2, timeout=90))
    assert first["sides"] == second["sides"]
    assert 0 < sum(first["sides"]) < len(first["sides"])
    assert first["before"] == second["before"] == [[MASTER]] * len(first["sides"])
    for name, slots in second["described"].items():
        assert {slot: item[1] for slot, item in slots.items()} == {
            slot: item[1] for slot, item in first["described"][name].items()
        }
        expected = {MASTER} if name == "unused" else {MASTER, "exp_avg", "exp_avg_sq", "step"}
        assert set(slots) == expected
    assert second["described"]["1.bias"]["exp_avg"] == ((0,), torch.float32)
    assert first["described"]["1.bias"]["exp_avg"] == ((1,), torch.float32)


def gradients_of_another_layout() -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (2,))
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
        optimizer = HybridDeviceOptimizer([weight], torch.optim.SGD, cpu_fraction=1.0, lr=1.0)
        weight.decoupled_grad = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Replicate()])  # type: ignore[attr-defined]
        version = weight._version
        optimizer.step()
        assert weight._version > version  # autograd and running saves see the write
        assert torch.equal(weight.full_tensor(), -torch.arange(6.0).reshape(3, 2))  # type: ignore[attr-defined]
        weight.decoupled_grad = torch.ones_like(weight.to_local())  # type: ignore[attr-defined]
        optimizer.step()
        assert torch.equal(weight.full_tensor(), -1 - torch.arange(6.0).reshape(3, 2))  # type: ignore[attr-defined]


def gradients_with_the_rows_of_torch() -> None:
    """`fully_shard` gives the first rank all rows of the first parameter, and torch two of three."""
    from shardproof.fsdp import fully_shard

    with process_group():
        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(2)])
        first, second = fully_shard(model, mesh=mesh)
        values = torch.arange(6.0).reshape(3, 2)
        others = torch.nn.Parameter(second.detach().clone() + distribute_tensor(values, mesh, [Replicate()]))
        for fraction in (0.0, 1.0):
            optimizer = HybridDeviceOptimizer([first], torch.optim.SGD, cpu_fraction=fraction, lr=1.0)
            for gradient in (distribute_tensor(values, mesh, [Shard(0)]), others.detach()):
                before = first.full_tensor().detach()
                first.decoupled_grad = gradient
                optimizer.step()
                assert torch.equal(first.full_tensor(), before - values), fraction


def test_a_gradient_of_another_layout_is_redistributed_to_the_parameters() -> None:
    for outcome in run_ranks(2, gradients_of_another_layout):
        assert outcome.value is None


def test_a_gradient_with_other_rows_is_redistributed_to_the_parameters() -> None:
    for outcome in run_ranks(2, gradients_with_the_rows_of_torch):
        assert outcome.value is None


def round_trip(path: Path) -> list[float]:
    """Saves with FSDP2 and the hybrid optimizer, and goes on at other fractions."""
    with process_group():
        model = sharded(torch.bfloat16)
        optimizer = hybrid(model, 0.5, master_dtype=torch.float32)
        run(model, optimizer, 0, 2)
        sp.save(path / "half", {"model": model, "optimizer": optimizer})
        losses = run(model, optimizer, 2, 4)
        for fraction in (0.0, 1.0):
            other = sharded(torch.bfloat16)
            target = hybrid(other, fraction, master_dtype=torch.float32)
            sp.load(path / "half", {"model": other, "optimizer": target})
            assert run(other, target, 2, 4) == losses
            assert all(map(torch.equal, locals_of(other), locals_of(model)))
        return losses


def test_sharded_state_is_saved_and_loaded(tmp_path: Path) -> None:
    outcomes = run_ranks(2, round_trip, tmp_path, timeout=90)
    assert all(outcome.value for outcome in outcomes)
    # one process, no sharding
    model = network(torch.bfloat16)
    optimizer = hybrid(model, 1.0, master_dtype=torch.float32)
    sp.load(tmp_path / "half", {"model": model, "optimizer": optimizer})
    assert not any(isinstance(weight, DTensor) for weight in model.parameters())
    assert float(optimizer.state[model[0].weight]["step"]) == 2
    assert model.unused not in optimizer.state


class Normed(torch.optim.Optimizer):
    """Not elementwise: a step has the length of the learning rate, however long the momentum is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    momentum.mul_(0.9).add_(weight.grad)
                    weight.sub_(group["lr"] * momentum / (momentum.norm() + 1e-6))


def refusals(kind: str) -> list[str]:
    """The errors of optimizers that are not elementwise, over shards. Rows of 1-D and 2-D parameters."""
    with process_group():
        if kind == "fsdp2":
            model = sharded()
        else:
            model = sp.fsdp.fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))
        matrices = [weight for weight in model.parameters() if weight.ndim == 2]
        found = []
        for make in (torch.optim.Muon, torch.optim.Adafactor, Normed):
            for fraction in (0.0, 1.0):
                with pytest.raises(ValueError, match="is sharded") as caught:
                    HybridDeviceOptimizer(matrices, make, cpu_fraction=fraction)
                found.append(str(caught.value))
        # of one side alone, and of a group that is added later
        optimizer = HybridDeviceOptimizer(
            matrices[:1], torch.optim.AdamW, cpu_optimizer_class=Normed, cpu_fraction=0.2
        )
        with pytest.raises(ValueError, match="Normed is not elementwise"):
            optimizer.add_param_group({"params": matrices[1:]})
        assert len(optimizer.param_groups) == 1
        whole = torch.nn.Parameter(torch.zeros(2))
        optimizer.add_param_group({"params": whole})
        assert optimizer.is_on_cpu(whole)
        return found


@pytest.mark.parametrize("kind", ["fsdp2", "flat"])
def test_an_optimizer_that_is_not_elementwise_is_refused_for_shards_on_all_ranks(kind: str) -> None:
    first, second = (outcome.value for outcome in run_ranks(2, refusals, kind, timeout=90))
    assert first == second
    for name, errors in zip(("Muon", "Adafactor", "Normed"), (first[:2], first[2:4], first[4:]), strict=True):
        assert all(f"{name} is not elementwise" in error for error in errors)


def test_an_optimizer_that_is_not_elementwise_steps_a_dtensor_that_is_whole_on_each_rank() -> None:
    for outcome in run_ranks(2, replicated, timeout=60):
        assert outcome.value


def replicated() -> bool:
    with process_group():
        mesh = init_device_mesh("cpu", (2,))
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Replicate()]))
        plain = torch.nn.Parameter(torch.ones(3, 2))
        for one, optimizer in (
            (weight, HybridDeviceOptimizer([weight], torch.optim.Muon, cpu_fraction=1.0)),
            (plain, torch.optim.Muon([plain])),
        ):
            one.square().sum().backward()
            optimizer.step()
        return torch.equal(weight.to_local(), plain)  # type: ignore[attr-defined]


def test_slots_of_an_optimizer_that_is_not_elementwise_are_saved_and_loaded(tmp_path: Path) -> None:
    model, again = network(), network()
    optimizer = HybridDeviceOptimizer(model.parameters(), Normed)
    run_alone(model, optimizer, 0, 1)
    sp.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    other = HybridDeviceOptimizer(again.parameters(), Normed)
    sp.load(tmp_path / "step", {"model": again, "optimizer": other})
    run_alone(model, optimizer, 1, 3)
    run_alone(again, other, 1, 3)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def run_alone(model: torch.nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        model(torch.full((4, 5), 0.1 * (step + 1))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
