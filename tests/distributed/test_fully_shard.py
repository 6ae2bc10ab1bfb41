"""`fsdp.fully_shard` on real ranks: equal to plain training and to FSDP2, with each strategy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardproof.engine.state import LOCAL
from tests.distributed.fully_sharded import (
    CollectiveLog,
    adamw,
    flat,
    loss_of,
    made,
    mesh_of,
    plain,
    same,
    train,
    words_of,
)
from tests.harness import process_group, rank, run_ranks

STRATEGIES = ("all", "optimizer_gradients")


def values(outcomes: list) -> list:
    return [outcome.value for outcome in outcomes]


def every_strategy() -> None:
    from torch.distributed.fsdp import fully_shard as fsdp2

    from shardproof.fsdp import full_state_dict

    with process_group():
        mesh = mesh_of()
        reference = made()
        expected = plain(reference, adamw(reference.parameters()))
        theirs = made()
        for block in theirs.blocks:
            fsdp2(block, mesh=mesh)
        fsdp2(theirs, mesh=mesh)
        assert train(theirs, adamw(theirs.parameters())) == expected
        for strategy in STRATEGIES:
            model = flat(made(), mesh, strategy=strategy)
            assert train(model, adamw(model.parameters())) == expected, strategy
            full = full_state_dict(model)
            same(full, reference)
            for name, value in theirs.state_dict().items():
                assert torch.equal(full[name], value.full_tensor())
        model = flat(made(), mesh, prefetch=0, reshard_after_forward=False)
        assert train(model, adamw(model.parameters())) == expected


def test_two_ranks_equal_plain_training_and_fsdp2_bit_for_bit() -> None:
    values(run_ranks(2, every_strategy, timeout=120))


def sharded_less() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from shardproof.optim import DistributedOptimizer

    with process_group():
        reference = made(blocks=1)
        expected = plain(reference, adamw(reference.parameters()))
        copied = DistributedDataParallel(made(blocks=1))
        assert train(copied, adamw(copied.parameters())) == pytest.approx(expected, rel=1e-5)
        model = made(blocks=1)
        optimizer = DistributedOptimizer(model, torch.optim.AdamW, lr=1e-2, shard_gradients=False)
        assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)


def test_what_the_error_of_a_strategy_advises_trains_as_without_sharding() -> None:
    values(run_ranks(2, sharded_less))


def optimizers() -> None:
    from shardproof.fsdp import clip_grad_norm_, full_state_dict

    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        "adamw one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    }
    with process_group():
        mesh = mesh_of()
        for make in kinds.values():
            reference, model = made(blocks=1), flat(made(blocks=1), mesh)
            assert train(model, make(model.parameters()), 2) == plain(
                reference, make(reference.parameters()), 2
            )
            same(full_state_dict(model), reference)
        reference, model = made(), flat(made(), mesh)
        expected = plain(reference, adamw(reference.parameters()), max_norm=0.1)
        found = train(model, adamw(model.parameters()), clip=lambda: clip_grad_norm_(model.parameters(), 0.1))
        assert found == pytest.approx(expected, rel=1e-5)
        norm = clip_grad_norm_(model, float("inf"))
        assert norm.item() == pytest.approx(0.1, rel=1e-4)


def test_any_optimizer_steps_and_norms_count_each_element_once() -> None:
    values(run_ranks(2, optimizers))


def four() -> None:
    from torch.distributed.fsdp import fully_shard as fsdp2

    from shardproof.fsdp import clip_grad_norm_, full_state_dict

    with process_group():
        mesh = mesh_of(2, 2, names=("replicate", "shard"))
        theirs = made()
        for block in theirs.blocks:
            fsdp2(block, mesh=mesh)
        fsdp2(theirs, mesh=mesh)
        expected = train(theirs, adamw(theirs.parameters()))
        for strategy in STRATEGIES:
            model = flat(made(), mesh, strategy=strategy)
            assert train(model, adamw(model.parameters())) == expected, strategy
            full = full_state_dict(model)
            for name, value in theirs.state_dict().items():
                assert torch.equal(full[name], value.full_tensor())
        reference = made()
        expected = plain(reference, adamw(reference.parameters()), max_norm=0.5)
        model = flat(made(), mesh_of())
        scale = model.blocks[0].scale
        assert sum(scale.to_local().shape) == getattr(scale, LOCAL).placed.volumes().sum()
        clip = lambda: clip_grad_norm_(model, 0.5)  # noqa: E731
        assert train(model, adamw(model.parameters()), clip=clip) == pytest.approx(expected, rel=1e-4)
        return [tuple(p.to_local().shape) for p in model.blocks[0].parameters()]


def test_four_ranks_hybrid_and_sizes_smaller_than_the_ranks() -> None:
    held = values(run_ranks(4, four, timeout=120))
    for name, sizes in zip(["scale", "norm", "norm bias", "up"], zip(*held, strict=True), strict=False):
        rows = [size[0] for size in sizes]
        assert sum(rows) == {"scale": 1, "up": 31}.get(name, 10)
    assert any(0 in shape for shape in held[0])
    assert len({tuple(shapes) for shapes in held}) > 1


def tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from shardproof.fsdp import clip_grad_norm_, full_state_dict, fully_shard, load_full_state_dict

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    with process_group():
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        torch.manual_seed(0)
        model = Mlp()
        torch.manual_seed(0)
        reference = Mlp()
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        optimizer, expected = adamw(model.parameters()), adamw(reference.parameters())
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.rand(2, 5, 6, generator=generator)
            optimizer.zero_grad()
            expected.zero_grad()
            model(inputs[rank() // 2]).square().mean().backward()
            reference(inputs).square().mean().backward()
            norm = clip_grad_norm_(model, 0.01)
            same_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
            torch.testing.assert_close(norm, same_norm)
            optimizer.step()
            expected.step()
        held: dict[str, int] = {}
        for name, value in reference.state_dict().items():
            parameter = model.get_parameter(name)
            layout, local = getattr(parameter, LOCAL), parameter.to_local()
            assert parameter.shape == value.shape and tuple(local.shape) == layout.local_shape
            assert torch.allclose(parameter.full_tensor(), value, rtol=1e-4, atol=1e-6)
            assert torch.allclose(parameter.norm().full_tensor(), value.norm(), rtol=1e-4)
            assert torch.allclose(parameter.detach().T.full_tensor(), value.T, rtol=1e-4, atol=1e-6)
            held[name] = local.numel()
            for index in range(len(layout.local)):
                (at, size), (start, _) = layout.local.pair(index), layout.placed.pair(index)
                here = tuple(slice(a, a + s) for a, s in zip(at, size, strict=True))
                there = tuple(slice(a, a + s) for a, s in zip(start, size, strict=True))
                torch.testing.assert_close(local[here], value[there], rtol=1e-4, atol=1e-6)
        full = full_state_dict(model)
        assert torch.allclose(full["up.weight"].full_tensor(), reference.up.weight, atol=1e-5)
        load_full_state_dict(model, {name: torch.ones_like(v) for name, v in reference.state_dict().items()})
        assert all((p.to_local() == 1).all() for p in model.parameters())
        return held


def test_tensor_parallel_beneath() -> None:
    held = values(run_ranks(4, tensor_parallel))
    assert sum(rank["up.weight"] for rank in held) == 60
    assert sum(rank["down.weight"] for rank in held) == 60


def experts() -> None:
    from shardproof.fsdp import clip_grad_norm_, fully_shard

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.expert(self.dense(x))

    with process_group():
        mesh = mesh_of(2, 2, names=("expert", "replica"))
        everyone = mesh_of()
        torch.manual_seed(0)
        model = Sparse()
        torch.manual_seed(100 + rank() // 2)  # two experts, each on two ranks
        nn.init.normal_(model.expert.weight)
        wanted = model.expert.weight.detach().clone()
        fully_shard(model.expert, mesh=mesh["replica"], gradient_divisor=4)
        fully_shard(model, mesh=everyone)
        model(torch.ones(3, 4)).sum().backward()
        # Each rank's gradient of the expert's bias is 3; two ranks have it, and the mean is over all four.
        assert (model.expert.bias.grad.to_local() == 1.5).all()
        dense = clip_grad_norm_(model.dense, float("inf"))
        both = clip_grad_norm_(model.expert, float("inf"), different_over=mesh.get_group("expert"))
        optimizer = torch.optim.SGD([{"params": list(model.dense.parameters())}], lr=0.1)
        optimizer.add_param_group({"params": list(model.expert.parameters()), "lr": 0.0})
        optimizer.step()
        first, stop = getattr(model.expert.weight, LOCAL).placed.pair(0)[0][0], 0
        stop = first + model.expert.weight.to_local().shape[0]
        assert torch.equal(model.expert.weight.to_local(), wanted[first:stop])
        return dense.item(), both.item()


def test_expert_units_on_their_own_mesh() -> None:
    assert len(set(values(run_ranks(4, experts)))) == 1


def accumulate() -> None:
    from shardproof.fsdp import full_state_dict, no_sync

    with process_group():
        for strategy in STRATEGIES:
            reference, model = made(), flat(made(), mesh_of(), strategy=strategy)
            one, other = adamw(reference.parameters()), adamw(model.parameters())
            for step in range(2):
                one.zero_grad()
                other.zero_grad()
                sums: list[list[torch.Tensor]] = []
                for part in range(2):
                    for micro in range(2):
                        loss_of(reference, words_of(step, 2 * part + micro)).backward()
                    sums.append([p.grad for p in reference.parameters()])
                    one.zero_grad()
                for parameter, first, second in zip(reference.parameters(), *sums, strict=True):
                    parameter.grad = (first + second) / 2
                with CollectiveLog() as quiet, no_sync(model):
                    loss_of(model, words_of(step, 2 * rank())).backward()
                    once = len(quiet.calls)
                    with torch.no_grad():
                        model(words_of(step, 0))
                    if strategy != "all":  # parameters have not changed
                        assert len(quiet.calls) == once
                assert {name for name, _ in quiet.calls} <= {"all_gather"}
                assert all(parameter.grad is None for parameter in model.parameters())
                loss_of(model, words_of(step, 2 * rank() + 1)).backward()
                one.step()
                other.step()
            same(full_state_dict(model), reference)
            # With sync in every backward, sharded gradients are added to.
            loss_of(model, words_of(0, rank())).backward()
            for parameter in model.parameters():
                parameter.grad = None
            loss_of(model, words_of(0, rank())).backward()
            once = [parameter.grad.to_local().clone() for parameter in model.parameters()]
            loss_of(model, words_of(0, rank())).backward()
            for parameter, value in zip(model.parameters(), once, strict=True):
                assert torch.equal(parameter.grad.to_local(), value * 2)


def test_accumulation_without_sync() -> None:
    values(run_ranks(2, accumulate, timeout=120))


def recompute() -> None:
    from shardproof.fsdp import full_state_dict

    with process_group():
        for checkpointing in (False, True):
            reference = made(checkpointing=checkpointing)
            model = flat(made(checkpointing=checkpointing), mesh_of())
            assert train(model, adamw(model.parameters())) == plain(reference, adamw(reference.parameters()))
            same(full_state_dict(model), reference)
        reference, inside = made(blocks=2), made(blocks=2)
        for block in inside.blocks:  # part of a unit is recomputed
            whole = block.down.forward
            block.down.forward = lambda x, whole=whole: torch.utils.checkpoint.checkpoint(
                whole, x, use_reentrant=False
            )
        flat(inside, mesh_of())
        assert train(inside, adamw(inside.parameters())) == plain(reference, adamw(reference.parameters()))
        reference, nested = made(blocks=2), made(blocks=2)
        flat(nested, mesh_of())
        for index, block in enumerate(nested.blocks):
            nested.blocks[index] = Reentrant(block)
        assert train(nested, adamw(nested.parameters())) == plain(reference, adamw(reference.parameters()))


class Reentrant(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


def test_activation_checkpointing_gathers_again() -> None:
    values(run_ranks(2, recompute))


def mixed() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as fsdp2

    from shardproof.fsdp import MixedPrecision, full_state_dict, fully_shard

    with process_group():
        mesh = mesh_of()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        theirs = made()
        for block in theirs.blocks:
            fsdp2(block, mesh=mesh, mp_policy=policy)
        fsdp2(theirs, mesh=mesh, mp_policy=policy)
        expected = train(theirs, adamw(theirs.parameters()))
        for strategy in STRATEGIES:
            precision = MixedPrecision(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = flat(made(), mesh, strategy=strategy, mixed_precision=precision)
            assert train(model, adamw(model.parameters())) == expected, strategy
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            full = full_state_dict(model)
            for name, value in theirs.state_dict().items():
                assert torch.equal(full[name], value.full_tensor())
        precision = MixedPrecision(
            master_dtype=torch.float32, compute_dtype=torch.float16, output_dtype=torch.float32
        )
        low = fully_shard(made().to(torch.bfloat16), mesh=mesh, mixed_precision=precision)
        output = low(words_of(0, 0))
        output.sum().backward()
        assert output.dtype == torch.float32
        assert (
            {p.dtype for p in low.parameters()} == {p.grad.dtype for p in low.parameters()} == {torch.float32}
        )


def test_mixed_precision_equals_that_of_fsdp2() -> None:
    values(run_ranks(2, mixed, timeout=120))
