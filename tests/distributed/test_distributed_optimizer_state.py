"""The distributed optimizer's state on disk: any number of ranks to any other, to AdamW and back."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests.harness import process_group, rank, run_ranks, world_size

SECONDS = 120


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.gain


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def distributed(module: nn.Module, **options: Any) -> Any:
    from shardproof.optim import DistributedOptimizer

    return DistributedOptimizer(module, torch.optim.AdamW, lr=1e-2, bucket_bytes=128, **options)


def train(module: nn.Module, optimizer: Any, steps: range) -> None:
    """The same batch on every rank. The mean of equal gradients is each, but for rounding."""
    dtype = next(module.parameters()).dtype
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def stored(path: Path) -> dict[str, Any]:
    """All tensors and objects of a checkpoint, exactly."""
    import shardproof as sp

    items: dict[str, Any] = {}
    with sp.open(path) as checkpoint:
        for key in checkpoint.keys():  # noqa: SIM118
            value = checkpoint[key]
            if hasattr(value, "shape"):
                value = (str(value.dtype), list(value.shape), value[...].double().flatten().tolist())
            items[key] = value
    return items


def alone(target: Any, *args: Any) -> Any:
    return run_ranks(1, target, *args, timeout=SECONDS)[0].value


def on_ranks(count: int, target: Any, *args: Any) -> list[Any]:
    return [outcome.value for outcome in run_ranks(count, target, *args, timeout=SECONDS)]


def save_trained(path: Path, steps: int, dtype: torch.dtype, options: dict[str, Any]) -> int:
    """The number of collectives that saving ran."""
    import shardproof as sp

    with process_group():
        module = net(dtype)
        optimizer = distributed(module, **options)
        train(module, optimizer, range(steps))
        calls: list[str] = []
        names = ["all_reduce", "all_gather_single", "all_gather_into_tensor", "all_gather_object"]
        names += ["all_to_all_single", "broadcast"]
        with ExitStack() as stack:
            for name in filter(partial(hasattr, dist), names):
                stack.enter_context(patch.object(dist, name, lambda *_, name=name, **__: calls.append(name)))
            sp.save(path, {"model": module, "optimizer": optimizer})
        return len(calls)


def load_and_save(source: Path, target: Path, dtype: torch.dtype, options: dict[str, Any], more: int) -> None:
    import shardproof as sp

    with process_group():
        module = net(dtype, seed=9)
        optimizer = distributed(module, **options)
        state = {"model": module, "optimizer": optimizer}
        sp.load(source, state)
        train(module, optimizer, range(100, 100 + more))
        sp.save(target, state)


def load_plain(source: Path, target: Path, more: int) -> None:
    import shardproof as sp

    module = net(seed=9)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    state = {"model": module, "optimizer": optimizer}
    sp.load(source, state)
    train(module, optimizer, range(100, 100 + more))
    sp.save(target, state)


def test_three_ranks_to_two_to_plain_adamw_and_back(tmp_path: Path) -> None:
    three, two, plain, back = (tmp_path / name for name in ("three", "two", "plain", "back"))
    assert on_ranks(3, save_trained, three, 3, torch.float32, {}) == [0, 0, 0]
    on_ranks(2, load_and_save, three, two, torch.float32, {"shard_gradients": False}, 0)
    alone(load_plain, two, plain, 0)
    on_ranks(3, load_and_save, plain, back, torch.float32, {}, 0)
    expected = stored(three)
    assert expected["optimizer.up.weight.exp_avg"][1] == [8, 5]
    assert expected["optimizer.gain.step"][2] == [3.0]
    assert not any(key.startswith("optimizer.unused.weight.exp") for key in expected)
    for other in (two, plain, back):
        assert stored(other) == expected
    on = [tmp_path / f"on {name}" for name in ("two", "plain")]
    on_ranks(2, load_and_save, three, on[0], torch.float32, {}, 3)
    alone(load_plain, three, on[1], 3)
    assert stored(on[0]) == stored(on[1]), "training goes on alike"


def test_state_before_the_first_step_is_empty_in_every_optimizer(tmp_path: Path) -> None:
    two, plain, back = (tmp_path / name for name in ("two", "plain", "back"))
    assert on_ranks(2, save_trained, two, 0, torch.float32, {}) == [0, 0]
    alone(load_plain, two, plain, 0)
    on_ranks(3, load_and_save, plain, back, torch.float32, {}, 0)
    expected = stored(two)
    assert not any(key.startswith("optimizer.") and not key.endswith("@options") for key in expected)
    assert stored(plain) == expected
    assert stored(back) == expected


PRECISE = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}


def test_masters_and_slots_keep_their_bits_and_dtypes(tmp_path: Path) -> None:
    options = {"state_dtypes": PRECISE}
    three, two, back = (tmp_path / name for name in ("three", "two", "back"))
    on_ranks(3, save_trained, three, 3, torch.bfloat16, options)
    on_ranks(2, load_and_save, three, two, torch.bfloat16, options, 0)
    on_ranks(4, load_and_save, two, back, torch.bfloat16, options, 0)
    expected = stored(three)
    assert stored(two) == expected
    assert stored(back) == expected
    dtype, shape, master = expected["optimizer.up.weight.master"]
    assert (dtype, shape) == ("torch.float32", [8, 5])
    assert master != expected["model.up.weight"][2], "a master is finer than its parameter"
    assert expected["optimizer.up.weight.exp_avg"][0] == "torch.bfloat16"
    assert expected["optimizer.unused.bias.master"][1] == [2], "masters are there without a gradient"


def save_at_zero_and_go_on(path: Path) -> tuple[bool, bool]:
    import shardproof as sp

    with process_group():
        untouched, module = net(torch.bfloat16), net(torch.bfloat16)
        one, two = distributed(untouched), distributed(module)
        sp.save(path, {"model": module, "optimizer": two})
        train(untouched, one, range(2))
        train(module, two, range(2))
        loaded = net(torch.bfloat16, seed=3)
        three = distributed(loaded)
        sp.load(path, {"model": loaded, "optimizer": three})
        train(loaded, three, range(2))
        results = [list(item.state_dict().values()) for item in (untouched, module, loaded)]
        equal = [all(map(torch.equal, results[0], other)) for other in results[1:]]
        return equal[0], equal[1]


def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    assert on_ranks(3, save_at_zero_and_go_on, tmp_path / "zero") == [(True, True)] * 3


def load_model_only(path: Path) -> bool:
    """The optimizer's old masters must not undo the load at the next step."""
    import shardproof as sp

    with process_group():
        module = net(torch.bfloat16, seed=5)
        optimizer = distributed(module)
        train(module, optimizer, range(50, 53))
        sp.load(path, {"model": module}, strict=False)
        fresh = net(torch.bfloat16, seed=6)
        sp.load(path, {"model": fresh}, strict=False)
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        train(module, optimizer, range(60, 61))
        return all(map(torch.equal, module.state_dict().values(), fresh.state_dict().values()))


def test_a_model_only_load_is_not_undone(tmp_path: Path) -> None:
    on_ranks(2, save_trained, tmp_path / "saved", 3, torch.bfloat16, {})
    assert on_ranks(2, load_model_only, tmp_path / "saved") == [True, True]


def tensor_parallel(source: Path | None, target: Path, more: int) -> None:
    """2 (data) × 2 (tensor)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import shardproof as sp

    with process_group():
        mesh = init_device_mesh("cpu", (world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        module = net()
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = distributed(module, process_group=mesh.get_group("dp"))
        state = {"model": module, "optimizer": optimizer}
        if source is not None:
            sp.load(source, state)
        train(module, optimizer, range(100, 100 + more))
        sp.save(target, state)


def test_ranges_of_tensor_parallel_parameters_are_in_the_models_space(tmp_path: Path) -> None:
    split, plain, back = (tmp_path / name for name in ("split", "plain", "back"))
    on_ranks(4, tensor_parallel, None, split, 3)
    alone(load_plain, split, plain, 0)
    on_ranks(4, tensor_parallel, plain, back, 0)
    expected = stored(split)
    assert expected["optimizer.up.weight.exp_avg"][1] == [8, 5]
    assert stored(plain) == expected
    assert stored(back) == expected


def with_hybrid(source: Path | None, target: Path, fraction: float, more: int) -> None:
    import shardproof as sp
    from shardproof.optim import DistributedOptimizer, HybridDeviceOptimizer

    with process_group():
        module = net(seed=rank())
        optimizer = DistributedOptimizer(
            module,
            partial(HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW, cpu_fraction=fraction),
            lr=1e-2,
            fused=False,
            bucket_bytes=128,
        )
        state = {"model": module, "optimizer": optimizer}
        if source is not None:
            sp.load(source, state)
        train(module, optimizer, range(more))
        sp.save(target, state)


def test_a_hybrid_optimizer_within_keeps_the_same_state(tmp_path: Path) -> None:
    plain, half, back = (tmp_path / name for name in ("plain", "half", "back"))
    on_ranks(2, save_trained, plain, 3, torch.float32, {"fused": False})
    on_ranks(2, with_hybrid, None, half, 0.5, 3)
    assert stored(half) == stored(plain), "it trains alike, and its state is an AdamW's"
    on_ranks(3, with_hybrid, half, back, 1.0, 0)
    assert stored(back) == stored(plain)


class Mixture(nn.Module):
    """A dense layer, and the experts from `first` on, each of which sees every token."""

    def __init__(self, first: int, count: int, total: int) -> None:
        from shardproof.layouts import experts

        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(5, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(total))[first : first + count]
        experts.sequential(self.experts, first=first, total=total)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(self.dense(x)) for expert in self.experts)  # type: ignore[return-value]


def mixture(experts_over: int) -> tuple[Mixture, Any]:
    """Four experts over `experts_over` positions; ranks of one position share its experts."""
    count = 4 // experts_over
    groups = [
        dist.new_group(list(range(position, world_size(), experts_over))) for position in range(experts_over)
    ]
    module = Mixture(rank() % experts_over * count, count, 4)
    optimizer = distributed(
        module,
        expert_group=groups[rank() % experts_over],
        is_expert=lambda name, parameter: name.startswith("experts"),
    )
    return module, optimizer


def save_experts(path: Path, experts_over: int) -> None:
    import shardproof as sp

    with process_group():
        module, optimizer = mixture(experts_over)
        train(module, optimizer, range(3))
        sp.save(path, {"model": module, "optimizer": optimizer})


def load_experts(source: Path, target: Path, experts_over: int) -> None:
    import shardproof as sp

    with process_group():
        module, optimizer = mixture(experts_over)
        state = {"model": module, "optimizer": optimizer}
        sp.load(source, state)
        sp.save(target, state)


def load_experts_alone(source: Path, target: Path) -> None:
    import shardproof as sp

    module = Mixture(0, 4, 4)
    state = {"model": module, "optimizer": torch.optim.AdamW(module.parameters())}
    sp.load(source, state)
    sp.save(target, state)


def test_experts_load_under_any_expert_parallel_size(tmp_path: Path) -> None:
    on_ranks(4, save_experts, tmp_path / "over two", 2)
    expected = stored(tmp_path / "over two")
    _, shape, values = expected["optimizer.experts.weight.exp_avg"]
    assert shape == [4, 3, 5] and all(values), "every expert's slot, in one tensor"
    assert expected["optimizer.experts.weight.step"][1:] == ([4], [3.0] * 4)
    on_ranks(3, load_experts, tmp_path / "over two", tmp_path / "over one", 1)
    assert stored(tmp_path / "over one") == expected
    alone(load_experts_alone, tmp_path / "over one", tmp_path / "alone")
    assert stored(tmp_path / "alone") == expected
    on_ranks(4, load_experts, tmp_path / "alone", tmp_path / "over four", 4)
    assert stored(tmp_path / "over four") == expected
