"""The state_dict() of an optimizer in a state: legitimate data of one process, with advice where it loses."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import shardproof as sp
from shardproof.rendezvous import StoreRendezvous


def trained(size: int = 2, lr: float = 0.5) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(size)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_load_into_a_state_dict_warns_and_its_advice_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, source = trained(lr=0.25)
    sp.save(tmp_path / "step", {"optimizer": source.state_dict()})
    assert not caplog.records
    _, optimizer = trained()
    target = {"optimizer": optimizer.state_dict()}
    with caplog.at_level(logging.WARNING, "shardproof"):
        sp.load(tmp_path / "step", target)
    assert "state['optimizer']: it is the state_dict() of an optimizer" in caplog.text
    assert "call load_state_dict with the dict afterwards" in caplog.text
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(target["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_fresh_state_dict_is_an_error_with_advice_that_helps(tmp_path: Path) -> None:
    model, source = trained(lr=0.25)
    sp.save(tmp_path / "step", {"optimizer": source.state_dict()})
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(sp.KeyMismatchError, match=r"(?s)optimizer\.state: .*put the optimizer itself into"):
        sp.load(tmp_path / "step", {"optimizer": fresh.state_dict()})
    sp.load(tmp_path / "step", {"model": model, "optimizer": fresh}, exclude="model")
    assert fresh.param_groups[0]["lr"] == 0.25
    assert torch.equal(
        fresh.state[model.weight]["exp_avg"],  # type: ignore[index]
        source.state[model.weight]["exp_avg"],  # type: ignore[index]
    )


def on_two_ranks(path: Path, states: list[Any]) -> list[BaseException | None]:
    store = HashStore()
    errors: list[BaseException | None] = [None, None]

    def save(rank: int) -> None:
        try:
            sp.save(path, states[rank], rendezvous=StoreRendezvous(store, rank, 2, deadline=30))
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


def test_state_dicts_of_different_parameters_name_the_optimizer(tmp_path: Path) -> None:
    states = [{"optimizer": trained(size)[1].state_dict()} for size in (2, 3)]
    for error in on_two_ranks(tmp_path / "step", states):
        assert isinstance(error, sp.StructureError | sp.RankFailure)
        assert "Put the optimizer itself into the state" in str(error)
        assert "PerRank" not in str(error)


class Loader:
    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("boom")


def test_the_error_of_a_load_state_dict_names_its_key_on_all_ranks(tmp_path: Path) -> None:
    sp.save(tmp_path / "step", {"data": {"loader": Loader()}})
    store = HashStore()
    texts = ["", ""]

    def load(rank: int) -> None:
        try:
            rendezvous = StoreRendezvous(store, rank, 2, deadline=30)
            sp.load(tmp_path / "step", {"data": {"loader": Loader()}}, rendezvous=rendezvous)
        except Exception as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for text in texts:
        assert "ValueError: boom (raised by the Loader at state['data']['loader'], key 'data.loader'" in text
