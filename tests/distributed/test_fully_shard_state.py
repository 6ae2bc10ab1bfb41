"""State of flat units through a checkpoint: from three ranks to two, and to a plain model."""

from __future__ import annotations

from pathlib import Path

import torch

import shardproof as sp
from tests.distributed.fully_sharded import CollectiveLog, adamw, flat, made, mesh_of, plain, same, train
from tests.distributed.test_fully_shard import values
from tests.harness import process_group, run_ranks

OPTIONS = {"unused": True}
STRATEGIES = ("all", "optimizer_gradients")


def arrays(state: dict) -> dict:
    return {name: value.numpy() for name, value in state.items()}


def save_on_three(path: str) -> list[dict]:
    from shardproof.fsdp import full_state_dict

    saved = []
    with process_group():
        for strategy in STRATEGIES:
            model = flat(made(**OPTIONS), mesh_of(), strategy=strategy)
            optimizer = adamw(model.parameters())
            sp.save(f"{path}/{strategy}-fresh", {"model": model, "optimizer": optimizer})
            train(model, optimizer)
            with CollectiveLog() as recorded:
                sp.save(f"{path}/{strategy}", {"model": model, "optimizer": optimizer})
            assert recorded.calls == []
            saved.append(arrays(full_state_dict(model)))
            twice = {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}
            model.load_state_dict(twice, assign=True)
            sp.save(f"{path}/{strategy}-assigned", {"model": model})
    return saved


def load_on_two(path: str) -> list[dict]:
    from shardproof.fsdp import full_state_dict

    loaded = []
    with process_group():
        for strategy in STRATEGIES:
            model = flat(made(**OPTIONS), mesh_of(), strategy=strategy)
            optimizer = adamw(model.parameters())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            sp.load(f"{path}/{strategy}", {"model": model, "optimizer": optimizer})
            loaded.append(arrays(full_state_dict(model)))
            sp.save(f"{path}/{strategy}-again", {"model": model, "optimizer": optimizer})
            reference = made(**OPTIONS)
            other = adamw(reference.parameters())
            sp.load(f"{path}/{strategy}", {"model": reference, "optimizer": other})
            assert train(model, optimizer, 2, first=3) == plain(reference, other, 2, first=3)
            same(full_state_dict(model), reference)
    return loaded


def test_three_ranks_to_two_and_to_a_plain_model(tmp_path: Path) -> None:
    saved = values(run_ranks(3, save_on_three, str(tmp_path), timeout=120))[0]
    for loaded in values(run_ranks(2, load_on_two, str(tmp_path), timeout=120)):
        for before, after in zip(saved, loaded, strict=True):
            assert all((after[name] == value).all() for name, value in before.items())
    for strategy, weights in zip(STRATEGIES, saved, strict=True):
        untrained = made(**OPTIONS)
        fresh = adamw(untrained.parameters())
        sp.load(f"{tmp_path}/{strategy}-fresh", {"model": untrained, "optimizer": fresh})
        assert not fresh.state
        same(made(**OPTIONS).state_dict(), untrained)
        sp.load(f"{tmp_path}/{strategy}-assigned", {"model": untrained})
        same({key: torch.from_numpy(value) * 2 for key, value in weights.items()}, untrained)
        states = []
        for name in (strategy, f"{strategy}-again"):
            model = made(**OPTIONS)
            optimizer = adamw(model.parameters())
            sp.load(f"{tmp_path}/{name}", {"model": model, "optimizer": optimizer})
            same({key: torch.from_numpy(value) for key, value in weights.items()}, model)
            states.append(optimizer.state_dict()["state"])
            assert optimizer.state[model.embed.weight]["step"] == 3
            assert optimizer.state[model.embed.weight]["exp_avg"].abs().sum() > 0
            assert model.unused.weight not in optimizer.state
        assert states[0].keys() == states[1].keys()
        for number, slots in states[0].items():
            assert all(torch.equal(value, states[1][number][slot]) for slot, value in slots.items())
