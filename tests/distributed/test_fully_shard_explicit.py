"""`fsdp` beside torch's FSDP2 on the same model: ignored parameters, `unshard`, and explicit prefetches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.fully_sharded import (
    CollectiveLog,
    adamw,
    flat,
    loss_of,
    made,
    mesh_of,
    train,
    words_of,
)
from tests.harness import process_group, rank, run_ranks


def values(outcomes: list) -> list:
    return [outcome.value for outcome in outcomes]


def theirs_of(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(), **options)
    return fully_shard(model, mesh=mesh_of(), **options)


def ignored() -> None:
    from shardproof.fsdp import full_state_dict, fully_shard

    with process_group():
        models = []
        for shard in (theirs_of, lambda model, **options: flat(model, mesh_of(), **options)):
            model = made(blocks=2)
            chosen = {model.blocks[0].scale, model.head.weight}
            models.append(shard(model, ignored_params=chosen))
            assert all(one in chosen for one in (model.blocks[0].scale, model.head.weight))
            loss_of(model, words_of(0, rank())).backward()
        theirs, ours = ([p.grad for p in (m.blocks[0].scale, m.head.weight)] for m in models)
        assert all(map(torch.equal, ours, theirs))  # of this rank's batch alone
        ours_whole = full_state_dict(model, on_all_ranks=False)
        assert set(ours_whole) == (set() if rank() else set(model.state_dict()))
        with pytest.raises(TypeError, match="takes one module, found a list.*the module around them"):
            fully_shard(list(made().blocks), mesh=mesh_of())


def test_ignored_parameters_are_those_of_fsdp2() -> None:
    values(run_ranks(2, ignored))


def whole() -> None:
    from shardproof.fsdp import reshard, unshard

    with process_group():
        reference, theirs, ours = made(blocks=1), theirs_of(made(blocks=1)), flat(made(blocks=1), mesh_of())
        expected = train(theirs, adamw(theirs.parameters()), 1)
        assert train(ours, adamw(ours.parameters()), 1) == expected
        for async_op in (False, True):
            for call, model in ((lambda m: m.unshard(async_op=async_op), theirs), (None, ours)):  # noqa: B023
                block = model.blocks[0]
                handle = unshard(block, async_op=async_op) if call is None else call(block)
                assert (handle is None) == (not async_op)
                if handle is not None:
                    handle.wait()
                assert type(block.up.weight.data) is torch.Tensor
                assert block.up.weight.shape == reference.blocks[0].up.weight.shape
                assert hasattr(model.head.weight, "placements")  # not recursive
            assert torch.equal(ours.blocks[0].up.weight, theirs.blocks[0].up.weight)
            theirs.blocks[0].reshard()
            reshard(ours.blocks[0])
            assert ours.blocks[0].up.weight.placements == theirs.blocks[0].up.weight.placements
        ours.zero_grad()
        unshard(ours)
        ours.head.weight.square().sum().backward()
        reshard(ours)
        full = ours.head.weight.full_tensor()
        assert torch.allclose(ours.head.weight.grad.full_tensor(), 2 * full, rtol=1e-5)
        with pytest.raises(ValueError, match="Linear is not a unit"):
            unshard(ours.head)
        assert train(ours, adamw(ours.parameters()), 1) == train(theirs, adamw(theirs.parameters()), 1)


def test_unshard_and_reshard_show_what_those_of_fsdp2_show() -> None:
    values(run_ranks(2, whole))


def unsharded_loss() -> None:
    from shardproof.fsdp import unshard

    with process_group():
        reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            if one is model:
                unshard(one.blocks[0])
            one.blocks[0].up.weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        losses = [loss_of(one, words_of(0, rank())) for one in (model, reference)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        losses[0].backward()
        assert hasattr(model.blocks[0].up.weight, "placements")


def test_the_backward_of_a_loss_of_unsharded_parameters_reshards_them() -> None:
    values(run_ranks(2, unsharded_loss))


def prefetched() -> None:
    from shardproof.fsdp import set_modules_to_backward_prefetch, set_modules_to_forward_prefetch
    from shardproof.training.fsdp.unit import unit_of

    with process_group():
        theirs, ours = theirs_of(made()), flat(made(), mesh_of(), prefetch=0)
        theirs.blocks[0].set_modules_to_forward_prefetch([theirs.blocks[1], theirs.blocks[2]])
        theirs.blocks[2].set_modules_to_backward_prefetch([theirs.blocks[1], theirs.blocks[0]])
        first, second, third = ours.blocks
        set_modules_to_forward_prefetch(first, [second, third])
        set_modules_to_backward_prefetch(third, [second, first])
        buffers = [len(unit_of(part).buffers) for part in (ours, *ours.blocks)]
        gathered: list[int] = []
        with CollectiveLog() as log:
            count = lambda *_: gathered.append(len(log.calls))  # noqa: E731
            hooks = [block.norm.register_forward_pre_hook(count) for block in ours.blocks]
            loss = loss_of(ours, words_of(0, rank()))
            assert gathered == [sum(buffers)] * 3  # all of them before the first block's computation
            hooks += [block.down.register_full_backward_pre_hook(count) for block in (third, second)]
            loss.backward()
            hooks += [ours.head.register_forward_pre_hook(lambda *_: gathered.clear())]
            loss = loss_of(ours, words_of(0, rank()))
            log.calls.clear()
            loss.backward()
            gathers = [[name for name, _ in log.calls[:n]].count("all_gather") for n in gathered]
            assert gathers == [sum(buffers[1:])] * 2
        for hook in hooks:
            hook.remove()
        ours.zero_grad()
        assert train(ours, adamw(ours.parameters())) == train(theirs, adamw(theirs.parameters()))
        with pytest.raises(ValueError, match="Linear is not a unit"):
            set_modules_to_forward_prefetch(ours, [nn.Linear(1, 1)])


def test_explicit_prefetches_gather_the_named_units_at_once() -> None:
    values(run_ranks(2, prefetched))
