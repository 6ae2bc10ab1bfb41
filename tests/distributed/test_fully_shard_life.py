"""Flat units: meta devices, missing gradients, order of collectives, memory, visible parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardproof as sp
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
from tests.distributed.test_fully_shard import STRATEGIES, values
from tests.harness import process_group, rank, run_ranks


def from_meta() -> None:
    from torch.distributed.tensor import DTensor

    from shardproof.fsdp import full_state_dict, load_full_state_dict, materialize

    with process_group():
        reference = made()
        with torch.device("meta"):
            model = flat(made(), mesh_of())
        objects = list(model.parameters())
        assert all(p.is_meta for p in objects)
        torch.manual_seed(rank())  # the first rank's values count
        materialize(model, "cpu")
        full = full_state_dict(model)
        assert 0 < full["blocks.1.up.weight"].std() < 1 and (full["blocks.2.scale"] == 1).all()
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        load_full_state_dict(model, reference.state_dict())
        assert train(model, adamw(model.parameters())) == plain(reference, adamw(reference.parameters()))
        same(full_state_dict(model), reference)

        reference = made()
        with torch.device("meta"):
            model = flat(made(), mesh_of())
        model.to_empty(device="cpu")
        assert all(isinstance(p, DTensor) and hasattr(p, LOCAL) for p in model.parameters())
        load_full_state_dict(model, reference.state_dict())
        assert train(model, adamw(model.parameters())) == plain(reference, adamw(reference.parameters()))
        with pytest.raises(ValueError, match="choose dtypes"):
            model.double()
        with torch.device("meta"):
            bare = flat(Bare(), mesh_of())
        with pytest.raises(ValueError, match="reset_parameters"):
            materialize(bare, "cpu")
        materialize(bare, "cpu", initialize=lambda module: module.only.fill_(3))
        assert (full_state_dict(bare)["only"] == 3).all()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[nn.Module] = []
        self.only = nn.Parameter(torch.ones(5))


def test_meta_device() -> None:
    values(run_ranks(2, from_meta))


def missing() -> None:
    from shardproof.fsdp import full_state_dict

    with process_group():
        model = flat(made(unused=True), mesh_of())
        reference = made(unused=True)
        optimizer, other = adamw(model.parameters()), adamw(reference.parameters())
        assert train(model, optimizer) == plain(reference, other)
        same(full_state_dict(model), reference)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == name.startswith("unused"), name
            assert (parameter in optimizer.state) == (parameter.grad is not None)
        # A gradient on one rank gives every rank one.
        chosen = Chosen()
        flat(chosen, mesh_of())
        chosen(rank() == 1).backward()
        assert chosen.always.grad is not None and chosen.sometimes.grad is not None
        assert chosen.never.grad is None
        gradient = chosen.sometimes.grad.to_local().sum().item()
        frozen = flat(made(blocks=1), mesh_of())
        for parameter in frozen.blocks.parameters():
            parameter.requires_grad_(False)
        loss_of(frozen, words_of(0, rank())).backward()
        assert all((p.grad is None) == n.startswith("blocks") for n, p in frozen.named_parameters())
        return gradient


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[nn.Module] = []
        self.always, self.sometimes, self.never = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, both: bool, start: torch.Tensor | None = None) -> torch.Tensor:
        first = self.always.sum() if start is None else start * 1
        return first + (self.sometimes.sum() if both else 0)


def test_a_parameter_without_gradient_has_none_on_all_ranks_or_on_none() -> None:
    assert sum(values(run_ranks(2, missing))) == 2.0  # four elements, mean of 0 and 1


def one_has_none() -> list:
    from shardproof.fsdp import no_sync

    calls = []
    with process_group():
        for strategy in STRATEGIES:
            model = flat(Chosen(), mesh_of(), strategy=strategy)
            start = torch.ones((), requires_grad=True)
            with no_sync(model):
                model(rank() == 0, start).backward()
            with CollectiveLog() as recorded:
                model(rank() == 0, start).backward()
            calls.append(recorded.calls)
    return calls


def test_a_rank_without_any_gradient_runs_the_same_collectives() -> None:
    first, second = values(run_ranks(2, one_has_none, timeout=40))
    assert first == second


def ordered() -> list:
    from shardproof.training.fsdp.unit import units_in

    with process_group():
        model = flat(made(unused=True), mesh_of())
        optimizer = adamw(model.parameters())
        with CollectiveLog() as recorded:
            train(model, optimizer, 2)
            half = len(recorded.calls)
            train(model, optimizer, 1)
        gathered: list[int] = []
        units = units_in(model)
        for block in model.blocks:
            block.register_forward_hook(lambda *_: gathered.append(sum(unit.has_gathered for unit in units)))
            block.register_full_backward_hook(lambda *_: gathered.append(sum(u.has_gathered for u in units)))
        train(model, optimizer, 1)
        assert not any(unit.has_gathered for unit in units)
        assert max(gathered) <= 3 < len(units)  # the outermost, the one that runs, one ahead
        assert all(unit.buffers[0].whole.untyped_storage().size() == 0 for unit in units)
        with CollectiveLog() as describing:
            model.state_dict()
            [getattr(parameter, LOCAL) for parameter in model.parameters()]
        assert describing.calls == []
        with torch.no_grad():
            model(words_of(0, 0))
        assert not any(unit.has_gathered for unit in units)
        assert half < len(recorded.calls)
        return recorded.calls


def test_collectives_come_in_one_order_and_few_units_are_gathered_at_once() -> None:
    calls = values(run_ranks(3, ordered))
    assert calls[0] == calls[1] == calls[2]
    assert [name for name, _ in calls[0]].count("all_reduce") == 3  # one a backward for all missing gradients


def loaded(path: str) -> None:
    from shardproof.fsdp import no_sync

    with process_group():
        for strategy in STRATEGIES:
            model, reference = flat(made(), mesh_of(), strategy=strategy), made()
            words = words_of(0, rank())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
            sp.save(f"{path}/{strategy}", {"model": model})
            sp.load(f"{path}/{strategy}", {"model": reference})
            for pass_before in ("forward", "no sync", "interrupted", "inference"):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                if pass_before == "forward":  # without a backward pass
                    model(words)
                elif pass_before == "no sync":
                    with no_sync(model):
                        model(words).sum().backward()
                elif pass_before == "inference":
                    with torch.inference_mode():
                        model(words)
                else:
                    interrupt = model.blocks[1].norm.register_forward_hook(interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        model(words)
                    interrupt.remove()
                sp.load(f"{path}/{strategy}", {"model": model})
                with torch.no_grad():
                    assert torch.equal(model(words), reference(words)), (strategy, pass_before)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_forward_after_a_load_uses_the_loaded_values(tmp_path: Path) -> None:
    values(run_ranks(3, loaded, str(tmp_path), timeout=90))


def visible() -> None:
    from torch.distributed.tensor import DTensor

    with process_group():
        for strategy in ("all", "optimizer_gradients"):
            model = flat(made(), mesh_of(), strategy=strategy)
            before = dict(model.named_parameters())

            def check(model: nn.Module = model, before: dict = before) -> None:
                now = model.state_dict(keep_vars=True)
                assert all(now[name] is parameter for name, parameter in before.items())
                assert all(isinstance(parameter, DTensor) for parameter in now.values())

            loss = loss_of(model, words_of(0, rank()))
            check()
            loss.backward()
            check()
            with pytest.raises(IndexError):
                model(torch.full((1, 1), 99))
            check()
            loss_of(model, words_of(0, rank()))  # without a backward pass
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            assert (model(words_of(0, 0)) == 0).all()  # written shards are gathered again
            check()


def test_the_module_shows_sharded_parameters_outside_of_forward_and_backward() -> None:
    values(run_ranks(2, visible))


def refused() -> None:
    from shardproof.fsdp import full_state_dict, fully_shard, no_sync

    with process_group():
        mesh = mesh_of()
        for strategy in ("optimizer", "none"):
            with pytest.raises(
                ValueError, match=f"{strategy}.*DistributedOptimizer.*DistributedDataParallel"
            ):
                fully_shard(nn.Linear(2, 2), mesh=mesh, strategy=strategy)
        with pytest.raises(ValueError, match="scalar"):
            fully_shard(Scalar(), mesh=mesh)
        model = made(blocks=1)
        fully_shard(model.blocks[0], mesh=mesh)
        with pytest.raises(ValueError, match="already a unit"):
            fully_shard(model.blocks[0], mesh=mesh)
        model.head.weight = model.embed.weight
        fully_shard(model.embed, mesh=mesh)
        with pytest.raises(ValueError, match=r"head\.weight is shared"):
            fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match="no parameters"):
            fully_shard(nn.ReLU(), mesh=mesh)
        outer = nn.Sequential(
            fully_shard(nn.Linear(3, 3), mesh=mesh), fully_shard(nn.Linear(3, 2), mesh=mesh)
        )
        fully_shard(outer, mesh=mesh)  # a root of units, without parameters of its own
        with CollectiveLog() as recorded:
            outer(torch.ones(1, 3)).sum().backward()
        assert [name for name, _ in recorded.calls].count("all_reduce") == 1
        for call in (full_state_dict, lambda module: no_sync(module).__enter__()):
            with pytest.raises(ValueError, match="no units"):
                call(nn.Linear(2, 2))
        tied, reference = made(), made()
        tied.head.weight, reference.head.weight = tied.embed.weight, reference.embed.weight
        flat(tied, mesh)
        assert tied.head.weight is tied.embed.weight
        assert train(tied, adamw(tied.parameters())) == plain(reference, adamw(reference.parameters()))


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.0))


def test_unsupported_modules_are_refused_and_tied_weights_train() -> None:
    values(run_ranks(2, refused))
