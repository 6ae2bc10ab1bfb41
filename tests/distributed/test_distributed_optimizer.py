"""The distributed optimizer on real ranks: equal to DDP and a plain optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import process_group, rank, run_ranks, world_size

SECONDS = 120


class Block(nn.Module):
    """Sizes that no number of ranks divides; one parameter smaller than any range."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 13)
        self.down = nn.Linear(13, 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.extra = nn.Linear(3, 3)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x))) * self.gain
        return self.extra(y) if extra else y


def block(seed: int = 0, dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(seed)
    return Block().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank())
    return torch.randn(4, 5, generator=generator).to(dtype)


Values = list[list[float]]


def values(net: nn.Module) -> Values:
    """Every parameter, exactly. Through state_dict, which waits for gathers."""
    return [item.double().flatten().tolist() for item in net.state_dict().values()]


def close(ours: Values, theirs: Values) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


def decays(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.1, "lr": 1e-2} if parameter.dim() > 1 else {"weight_decay": 0.0, "lr": 3e-2}


def on_ranks(count: int, target: Any, *args: Any) -> list[Any]:
    return [outcome.value for outcome in run_ranks(count, target, *args, timeout=SECONDS)]


# Equal to DDP


CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}, {"bucket_bytes": 128}),
    (
        torch.optim.AdamW,
        {"lr": 1e-2},
        {"bucket_bytes": 128, "shard_gradients": False, "param_groups": decays},
    ),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"overlap_reduce": False, "param_groups": decays}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"bucket_bytes": 1, "overlap_gather": False}),
]


def train_both() -> list[list[bool]]:
    """By case and step: ours are equal to DDP's."""
    with process_group():
        return [train_case(*case) for case in CASES]


def train_case(kind: Any, options: dict[str, Any], ours_options: dict[str, Any]) -> list[bool]:
    from torch.nn.parallel import DistributedDataParallel

    from shardproof.optim import DistributedOptimizer

    plain, ours = block(), block(seed=rank())  # ours are broadcast
    parallel = DistributedDataParallel(plain, find_unused_parameters=True)
    groups: Any = plain.parameters()
    if "param_groups" in ours_options:
        groups = [{"params": [item], **decays(name, item)} for name, item in plain.named_parameters()]
    reference = kind(groups, **options)
    optimizer = DistributedOptimizer(ours, kind, **options, **ours_options)
    equal = []
    for step in range(5):
        reference.zero_grad()
        optimizer.zero_grad()
        for micro in range(3):
            last = micro == 2
            with nullcontext() if last else parallel.no_sync():
                parallel(batch(3 * step + micro)).square().mean().backward()
            with nullcontext() if last else optimizer.no_sync():
                ours(batch(3 * step + micro)).square().mean().backward()
        reference.step()
        optimizer.step()
        equal.append(values(ours) == values(plain))
    return equal


def test_two_ranks_equal_ddp_bit_for_bit() -> None:
    for equal in on_ranks(2, train_both):
        assert equal == [[True] * 5] * len(CASES)


# Any number of ranks, clipping, overlap, gradients on some ranks only


VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap_reduce": False},
    {"overlap_gather": False},
    {"shard_gradients": False},
]


def train_unevenly(clip: float | None, microbatches: int) -> list[dict[str, Any]]:
    """By variant: parameters, norms, collectives and slots. Only rank 0 uses `extra`."""
    with process_group():
        return [train_variant(options, clip, microbatches) for options in VARIANTS]


def train_variant(options: dict[str, Any], clip: float | None, microbatches: int) -> dict[str, Any]:
    from shardproof.optim import DistributedOptimizer

    calls: list[str] = []
    with recorded(calls):
        net = block()
        optimizer = DistributedOptimizer(net, torch.optim.AdamW, lr=1e-2, bucket_bytes=128, **options)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(microbatches):
                net(batch(step * microbatches + micro), extra=rank() == 0).square().mean().backward()
            if clip is not None:
                norms.append(float(optimizer.clip_grad_norm_(clip)))
            optimizer.step()
        described = {
            name: (sorted(slots.tensors), float(slots.tensors["step"]) if slots.tensors else None)
            for slots in optimizer.describe_slots()
            for name, parameter in net.named_parameters()
            if parameter is slots.parameter
        }
        return {"values": values(net), "norms": norms, "calls": calls, "described": described}


def recorded(calls: list[str]) -> Any:
    """Notes every collective, with its size."""
    from contextlib import ExitStack
    from unittest.mock import patch

    from shardproof.training.optim.distributed import flat_bucket

    stack = ExitStack()
    for module, name in (
        (flat_bucket, "reduce_scatter"),
        (flat_bucket, "all_gather"),
        (dist, "all_reduce"),
        (flat_bucket.RankGroup, "broadcast"),
    ):
        real = getattr(module, name)

        def noted(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            sizes = [item.numel() for item in args if isinstance(item, torch.Tensor)]
            calls.append(f"{name} {sizes[0]}")
            return real(*args, **options)

        stack.enter_context(patch.object(module, name, noted))
    return stack


def whole_batch(ranks: int, clip: float | None, microbatches: int) -> Values:
    """The same training in one process."""
    net = block()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(microbatches):
            for number in range(ranks):
                generator = torch.Generator().manual_seed(100 * (step * microbatches + micro) + number)
                x = torch.randn(4, 5, generator=generator)
                (net(x, extra=number == 0).square().mean() / ranks).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return values(net)


@pytest.mark.parametrize(
    ("clip", "microbatches"), [(0.1, 1), (None, 2)], ids=["clipped", "twice without no_sync"]
)
def test_gradients_on_one_rank_only(clip: float | None, microbatches: int) -> None:
    results = on_ranks(3, train_unevenly, clip, microbatches)
    expected, reference = whole_batch(3, clip, microbatches), results[0][0]
    for number, options in enumerate(VARIANTS):
        for result in (of_rank[number] for of_rank in results):
            assert result["calls"] == results[0][number]["calls"], "as many, in the same order"
            assert result["values"] == results[0][number]["values"]
            if microbatches == 1 or options == {"overlap_gather": False}:
                assert result["values"] == reference["values"], f"{options} changes no bit"
            close(result["values"], expected)
            assert result["norms"] == reference["norms"]
            assert result["described"] == reference["described"]
    described = reference["described"]
    assert described["unused.weight"] == ([], None)
    assert described["extra.weight"] == (["exp_avg", "exp_avg_sq", "step"], 4.0)
    calls = reference["calls"]
    buckets = sum(call.startswith("broadcast") for call in calls)
    assert buckets > 4
    if microbatches == 1:
        assert sum(call.startswith("all_reduce") for call in calls) == 1 + 4, "one small sum a step"
        assert sum(call.startswith("reduce_scatter") for call in calls) == 4 * buckets
        assert 4 < sum(call.startswith("all_gather") for call in calls) < 4 * buckets, (
            "a bucket that no rank stepped is not gathered"
        )


def reduce_early() -> list[int]:
    """Buckets under way when backward returns: in no_sync; outside; twice without the last layer."""
    from shardproof.optim import DistributedOptimizer

    calls: list[str] = []
    counts = []
    with process_group():
        for overlap in (True, False):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
            optimizer = DistributedOptimizer(
                net, torch.optim.SGD, lr=0.1, bucket_bytes=1, overlap_reduce=overlap
            )
            with recorded(calls):
                with optimizer.no_sync():
                    net(batch(0)).sum().backward()
                counts.append(len(calls))
                net(batch(1)).sum().backward()
                counts.append(len(calls))
                for step in range(2):
                    optimizer.step()
                    optimizer.zero_grad()
                    calls.clear()
                    net[1](net[0](batch(step))).sum().backward()
                    counts.append(len(calls))
                optimizer.step()
            calls.clear()
        return counts


def test_buckets_are_reduced_during_backward_and_not_within_no_sync() -> None:
    """A bucket that still lacks gradients is sent when backward ends."""
    assert on_ranks(2, reduce_early) == [[0, 6, 6, 6, 0, 0, 0, 0]] * 2


def communicate_between() -> tuple[list[list[float]], Values]:
    """The program's own sum between backward and step; rank 1 does not use the last layer."""
    from shardproof.optim import DistributedOptimizer

    with process_group():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
        optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1, bucket_bytes=1)
        totals = []
        for step in range(2):
            (net if rank() == 0 else net[:2])(batch(step)).square().mean().backward()
            total = torch.full((7,), rank() + 1.0)
            dist.all_reduce(total)
            totals.append(total.tolist())
            optimizer.step()
            optimizer.zero_grad()
        return totals, values(net)


def test_the_programs_own_collectives_may_follow_backward() -> None:
    (totals, ours), (others, theirs) = on_ranks(2, communicate_between)
    assert totals == others == [[3.0] * 7] * 2
    assert ours == theirs


class Checkpointed(nn.Module):
    """Segments that are run again in backward, and a layer that all of them use if `shared`."""

    def __init__(self, how: str | None, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.shared = how, shared
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def segment(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(layer(x))
        return self.layers[0](x) if self.shared else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers[1:]:
            if self.how is None:
                x = self.segment(layer, x)
            else:
                x = checkpoint(self.segment, layer, x, use_reentrant=self.how == "reentrant")
        return x


HOWS = [None, "recomputing", "reentrant"]


def train_checkpointed(shared: bool) -> list[tuple[Values, int]]:
    """By kind of checkpoint: the parameters, and the number of reductions."""
    from shardproof.optim import DistributedOptimizer

    results = []
    with process_group():
        for how in HOWS:
            calls: list[str] = []
            net = Checkpointed(how, shared)
            with recorded(calls):
                optimizer = DistributedOptimizer(net, torch.optim.AdamW, lr=1e-2, bucket_bytes=1)
                for step in range(3):
                    with optimizer.no_sync():
                        net(batch(2 * step).requires_grad_()).square().mean().backward()
                    net(batch(2 * step + 1).requires_grad_()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            results.append((values(net), sum(call.startswith("reduce_scatter") for call in calls)))
    return results


@pytest.mark.parametrize("shared", [False, True])
def test_activation_checkpointing_changes_nothing(shared: bool) -> None:
    """A reentrant checkpoint gives a shared layer's gradient in parts, the last after its bucket is sent."""
    for (plain, reductions), recomputing, (reentrant, again) in on_ranks(2, train_checkpointed, shared):
        assert reductions == 3 * 8
        assert recomputing == (plain, reductions)
        if shared:
            close(reentrant, plain)
        else:
            assert (reentrant, again) == (plain, reductions)


def thaw() -> list[bool]:
    """By step: equal to a plain optimizer. A layer is frozen in some steps, another on rank 1 alone."""
    from shardproof.optim import DistributedOptimizer

    equal = []
    with process_group():
        plain, ours = block(), block()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = DistributedOptimizer(ours, torch.optim.AdamW, lr=1e-2, bucket_bytes=64)
        for step in range(6):
            for net in (plain, ours):
                net.down.requires_grad_(step % 3 != 1)
                net.up.requires_grad_(rank() == 0 or step % 2 == 0)
                net(batch(step)).square().mean().backward()
            for p in plain.parameters():
                used = torch.tensor(0.0 if p.grad is None else 1.0)
                dist.all_reduce(used)
                if used:
                    p.grad = (torch.zeros_like(p) if p.grad is None else p.grad) / world_size()
                    dist.all_reduce(p.grad)
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
            equal.append(values(ours) == values(plain))
    return equal


def test_parameters_frozen_and_thawed_between_steps_on_all_ranks_or_one() -> None:
    assert on_ranks(2, thaw) == [[True] * 6] * 2


def surprise() -> tuple[Values, Values]:
    """A layer that is used from the third step on, by rank 1 alone."""
    from shardproof.optim import DistributedOptimizer

    with process_group():
        results = []
        for overlap in (True, False):
            net = block()
            optimizer = DistributedOptimizer(
                net, torch.optim.SGD, lr=0.1, momentum=0.9, bucket_bytes=128, overlap_reduce=overlap
            )
            for step in range(5):
                optimizer.zero_grad()
                net(batch(step), extra=rank() == 1 and step > 1).square().mean().backward()
                optimizer.step()
            results.append(values(net))
        return results[0], results[1]


def test_gradients_that_were_not_expected_are_not_lost() -> None:
    net = block()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for number in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + number))
            (net(x, extra=number == 1 and step > 1).square().mean() / 2).backward()
        optimizer.step()
    for overlapped, at_the_end in on_ranks(2, surprise):
        assert overlapped == at_the_end
        close(overlapped, values(net))


def abandon() -> tuple[list[str], Values]:
    """Throws the gradients of a backward pass away. In it, only rank 0 has gradients for all buckets."""
    from shardproof.optim import DistributedOptimizer

    calls: list[str] = []
    with process_group(), recorded(calls):
        net = block()
        optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1, bucket_bytes=1)
        loss = sum(p.square().sum() for n, p in net.named_parameters() if rank() == 0 or n != "extra.weight")
        loss.backward()
        optimizer.zero_grad()
        net(batch(0)).sum().backward()
        optimizer.step()
        return calls, values(net)


def test_gradients_that_are_thrown_away_leave_no_rank_waiting() -> None:
    (calls, ours), (others, theirs) = on_ranks(2, abandon)
    assert calls == others
    assert ours == theirs
    assert on_ranks(2, abandon)[0][0] == calls


# bf16 with masters, the loss scale


def train_bf16(options: dict[str, Any]) -> tuple[bool, bool]:
    from shardproof.optim import DistributedOptimizer

    with process_group():
        net, ours = block(dtype=torch.bfloat16), block(dtype=torch.bfloat16)
        masters = [p.detach().float().clone() for p in net.parameters()]
        inner = torch.optim.AdamW(masters, lr=1e-2)
        optimizer = DistributedOptimizer(
            ours, torch.optim.AdamW, lr=1e-2, bucket_bytes=128, gradient_dtype=torch.float32, **options
        )
        for step in range(5):
            net(batch(step, torch.bfloat16)).square().mean().backward()
            for master, p in zip(masters, net.parameters(), strict=True):
                if p.grad is not None:
                    master.grad = p.grad.float() / world_size()
                    dist.all_reduce(master.grad)
                p.grad = None
            inner.step()
            with torch.no_grad():
                for master, p in zip(masters, net.parameters(), strict=True):
                    p.copy_(master)
            optimizer.zero_grad()
            ours(batch(step, torch.bfloat16)).square().mean().backward()
            optimizer.step()
        exact = True
        by_parameter = dict(zip(ours.parameters(), masters, strict=True))
        for slots in optimizer.describe_slots():
            item: Any = slots.tensors["master"]
            whole = by_parameter[slots.parameter].flatten()
            exact &= torch.equal(item.buffer, whole[item.start : item.stop])
        return values(ours) == values(net), exact


@pytest.mark.parametrize(
    "options", [{}, {"state_dtypes": {"exp_avg": torch.float32}}], ids=["direct", "raised"]
)
def test_bf16_with_fp32_masters_and_gradients_equals_the_hand_written_loop(options: dict[str, Any]) -> None:
    assert on_ranks(2, train_bf16, options) == [(True, True)] * 2


def overflow() -> list[Any]:
    from shardproof.optim import DistributedOptimizer
    from shardproof.training.optim.distributed import DynamicLossScale

    with process_group():
        net = block()
        optimizer = DistributedOptimizer(
            net, torch.optim.AdamW, lr=1e-2, loss_scale=DynamicLossScale(16.0, interval=2), bucket_bytes=128
        )
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            loss = optimizer.scale(net(batch(step)).square().mean())
            if step == 1 and rank() == 1:
                loss = loss * float("inf")
            loss.backward()
            before = values(net)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            seen.append((optimizer.skipped, before == values(net), optimizer.describe_shared()))
        seen.append(values(net))
        return seen


def test_an_inf_on_one_rank_skips_the_step_on_all_ranks() -> None:
    results = on_ranks(3, overflow)
    for *steps, parameters in results:
        assert [skipped for skipped, _, _ in steps] == [False, True, False, False, False]
        assert [unchanged for _, unchanged, _ in steps] == [False, True, False, False, False]
        scales = [shared["loss_scale"]["value"] for _, _, shared in steps]
        assert scales == [16.0, 8.0, 8.0, 16.0, 16.0]
        assert parameters == results[0][-1]


# Ranks that own nothing, experts, tensor parallelism


def own_little() -> tuple[list[Any], Values]:
    from shardproof.optim import DistributedOptimizer

    with process_group():
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        optimizer = DistributedOptimizer(net, torch.optim.AdamW, lr=0.1)
        net(torch.ones(1, 2) * (rank() + 1)).sum().backward()
        optimizer.step()
        described = []
        for slots in optimizer.describe_slots():
            item: Any = slots.tensors["exp_avg"]
            described.append((item.start, item.stop, str(item.buffer.dtype), float(slots.tensors["step"])))
        return described, values(net)


def test_ranks_that_own_nothing_declare_every_slot_and_have_the_parameters() -> None:
    results = on_ranks(4, own_little)
    owned = [described for described, _ in results]
    assert owned[3] == [(0, 0, "torch.float32", 1.0)] * 2, "a rank that owns nothing at all"
    for at, size in ((0, 2), (1, 1)):
        covered = sorted(x for rows in owned for x in range(rows[at][0], rows[at][1]))
        assert covered == list(range(size))
    reference = nn.Linear(2, 1)
    torch.manual_seed(0)
    reference.reset_parameters()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for number in range(4):
        (reference(torch.ones(1, 2) * (number + 1)).sum() / 4).backward()
    plain.step()
    for _, parameters in results:
        close(parameters, values(reference))


class Experts(nn.Module):
    """One dense layer, and the expert of this rank's expert-parallel position."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(5, 5)
        torch.manual_seed(10 + expert)
        self.expert = nn.Linear(5, 3)


def train_experts(users: tuple[int, ...]) -> tuple[Values, float]:
    """Ranks 0 and 2 have expert 0, ranks 1 and 3 expert 1. The ranks in `users` use their expert."""
    from shardproof.optim import DistributedOptimizer

    with process_group():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        net = Experts(rank() % 2)
        optimizer = DistributedOptimizer(
            net,
            torch.optim.SGD,
            lr=0.1,
            bucket_bytes=64,
            expert_group=groups[rank() % 2],
            is_expert=lambda name, parameter: name.startswith("expert"),
            overlap_reduce=len(users) == 4,
        )
        hidden = net.dense(batch(0))
        (net.expert(hidden) if rank() in users else hidden).square().mean().backward()
        norm = float(optimizer.clip_grad_norm_(0.5))
        optimizer.step()
        return values(net), norm


@pytest.mark.parametrize("users", [(0, 1, 2, 3), (0, 3)], ids=str)
def test_experts_have_a_group_of_their_own_and_norms_count_each_once(users: tuple[int, ...]) -> None:
    """An expert that one of its ranks uses is stepped on all of them."""
    results = on_ranks(4, train_experts, users)
    whole = nn.ModuleList([Experts(0), Experts(1)])
    dense = whole[0].dense
    for number in range(4):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        hidden = dense(x)
        output = whole[number % 2].expert(hidden) if number in users else hidden
        (output.square().mean() / 4).backward()
    parameters = [*dense.parameters(), *whole[0].expert.parameters(), *whole[1].expert.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    torch.optim.SGD(parameters, lr=0.1).step()
    for number, (ours, found) in enumerate(results):
        expected = [*dense.parameters(), *whole[number % 2].expert.parameters()]
        close(ours, [p.detach().flatten().tolist() for p in expected])
        assert found == pytest.approx(float(norm), rel=1e-5)


def train_tensor_parallel() -> tuple[Values, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from shardproof.optim import DistributedOptimizer

    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3), nn.LayerNorm(3))
        with torch.no_grad():
            torch.manual_seed(0)
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = DistributedOptimizer(
            net, torch.optim.AdamW, lr=0.1, process_group=mesh.get_group("dp"), bucket_bytes=64
        )
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(
                4, 5, generator=torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
            )
            (net(x) - 1.0).square().mean().backward()
            norm = float(optimizer.clip_grad_norm_(0.5))
            optimizer.step()
        optimizer.zero_grad()
        net[0].weight.decoupled_grad = torch.zeros(3, 5)  # this rank's part
        assert optimizer.count_zero_gradients() == 30
        optimizer.synchronize()
        full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        return [p.detach().flatten().tolist() for p in full], norm


def test_tensor_parallel_parameters_train_and_norms_count_replicas_once() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3), nn.LayerNorm(3))
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + number))
            ((net(x) - 1.0).square().mean() / 2).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()
    for ours, found in on_ranks(4, train_tensor_parallel):
        close(ours, values(net))
        assert found == pytest.approx(norm, rel=1e-4)


# Errors


def disagree() -> str:
    from shardproof.optim import DistributedOptimizer

    with process_group():
        with pytest.raises(ValueError, match="list of parameters is not the same on all ranks") as caught:
            DistributedOptimizer(nn.Linear(2, 2 + rank()), torch.optim.SGD, lr=0.1)
        return str(caught.value)


def test_parameters_that_differ_between_ranks_are_refused_on_all() -> None:
    texts = on_ranks(2, disagree)
    assert "rank 0" in texts[0] and "[2, 2]" in texts[0]
    assert "rank 1" in texts[1] and "[3, 2]" in texts[1]


class Head(nn.Module):
    """Reads the embedding's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding.weight[ids]) @ self.embedding.weight.T


def read_elsewhere() -> bool:
    from shardproof.optim import DistributedOptimizer

    with process_group():
        torch.manual_seed(0)
        net = Head()
        optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1, bucket_bytes=1)
        waits = []
        for _ in range(3):
            net(torch.tensor([rank(), 3])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            waits.append({w.name: w.bucket.gathering is not None for w in optimizer._weights})
            net.state_dict() if len(waits) == 2 else net(torch.tensor([0]))
            assert not any(w.bucket.gathering for w in optimizer._weights), (
                "each reader waits for the gathers"
            )
        return all(
            not pending["embedding.weight"] and pending["body.weight"] and pending["body.bias"]
            for pending in waits
        )


def load_at_once() -> tuple[list[bool], bool]:
    """`load_state_dict` directly after a step: if gathers run before and after it, and if its values stay."""
    from shardproof.optim import DistributedOptimizer

    with process_group():
        net = block()
        optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1, bucket_bytes=64)
        zeros = {name: torch.zeros_like(item) for name, item in net.state_dict().items()}
        net(batch(0)).sum().backward()
        optimizer.step()
        waits = [any(bucket.gathering for bucket in optimizer._buckets)]
        net.load_state_dict(zeros)
        waits.append(any(bucket.gathering for bucket in optimizer._buckets))
        optimizer.synchronize()
        return waits, not any(p.any() for p in net.parameters())


def test_a_model_that_is_loaded_after_the_step_is_not_overwritten_by_the_gather() -> None:
    assert on_ranks(2, load_at_once) == [([True, False], True)] * 2


def test_a_parameter_that_is_read_outside_of_its_module_is_gathered_by_the_step() -> None:
    assert on_ranks(2, read_elsewhere) == [True, True]
