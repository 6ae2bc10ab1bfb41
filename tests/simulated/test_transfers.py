"""The hybrid optimizer's copies with streams held: the notes of `training.optim.hybrid.stepped_copy`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shardproof._utils.accelerator import on_stream
from shardproof.optim import HybridDeviceOptimizer
from shardproof.training.optim.hybrid.stepped_copy import SideStreams, Transfers
from tests import simulated
from tests.accelerator import first_device
from tests.simulated.values import COUNT, all_are, device_memory, page_locked
from tests.simulated.waiting import LIMIT, is_done_soon, still_waits

pytestmark = pytest.mark.gpu


def streams_of(transfers: Transfers) -> tuple[torch.Stream, torch.Stream]:
    """The streams of copies to the host and to the device."""
    assert isinstance(transfers, SideStreams)
    return transfers._down, transfers._up


class Setting:
    """Parameters of ones on the host's side, stepped by plain SGD with a rate of 1."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(COUNT, device=first_device()))
        other = torch.nn.Parameter(torch.ones(3, device=first_device()))
        other.grad = torch.zeros_like(other)
        self.optimizer = HybridDeviceOptimizer(
            [self.weight, other], torch.optim.SGD, cpu_fraction=1.0, pin_memory=True, lr=1.0
        )
        (transfers,) = self.optimizer._transfers.values()
        self.down, self.up = streams_of(transfers)
        self.main = torch.accelerator.current_stream()
        self.gradient = torch.zeros(COUNT, device=first_device())
        torch.accelerator.synchronize()


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_down_waits_for_main(setting: Setting, background: ThreadPoolExecutor) -> None:
    setting.weight.grad = setting.gradient
    with simulated.held(setting.main):
        setting.gradient.fill_(3)
        stepping = background.submit(setting.optimizer.step)
        assert still_waits(stepping)
    stepping.result(LIMIT)
    assert all_are(setting.weight.detach(), -2)


@pytest.fixture
def laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lays every gradient out again, like one that is sharded in another way than its parameter."""

    def laid_out(gradient: torch.Tensor, *others: Any) -> torch.Tensor:
        return gradient.clone()

    monkeypatch.setattr("shardproof.training.optim.hybrid.stepped_copy.local_gradient", laid_out)


@pytest.mark.usefixtures("laid_out_anew")
def test_down_waits_for_a_gradient_that_is_laid_out_anew(
    setting: Setting, background: ThreadPoolExecutor
) -> None:
    setting.weight.grad = setting.gradient.fill_(3)
    setting.main.synchronize()
    with simulated.held(setting.main):
        stepping = background.submit(setting.optimizer.step)
        assert still_waits(stepping)
    stepping.result(LIMIT)
    assert all_are(setting.weight.detach(), -2)


@pytest.mark.usefixtures("laid_out_anew")
def test_a_gradient_that_is_laid_out_anew_lives_until_its_copy_is_done(
    setting: Setting, background: ThreadPoolExecutor
) -> None:
    setting.weight.grad = setting.gradient.fill_(3)
    with simulated.held(setting.down):
        stepping = background.submit(setting.optimizer.step)
        assert still_waits(stepping)
        others = [torch.full((COUNT,), 7.0, device=first_device()) for _ in range(5)]
        setting.main.synchronize()
    stepping.result(LIMIT)
    assert all_are(setting.weight.detach(), -2)
    assert all(all_are(other, 7) for other in others)


def test_a_second_step_waits_for_the_uploads_of_the_first(
    setting: Setting, background: ThreadPoolExecutor
) -> None:
    """Also on a stream that has not waited for the first one's."""
    setting.weight.grad = setting.gradient.fill_(3)
    setting.main.synchronize()
    own = torch.Stream(first_device())

    def step_on_own() -> None:
        with on_stream(own, first_device()):
            setting.optimizer.step()

    with simulated.held(setting.up):
        setting.optimizer.step()
        stepping = background.submit(step_on_own)
        assert still_waits(stepping)
    stepping.result(LIMIT)
    own.synchronize()
    assert all_are(setting.weight.detach(), -5)


def test_a_load_waits_for_the_uploads_of_a_step(setting: Setting, background: ThreadPoolExecutor) -> None:
    setting.weight.grad = setting.gradient.fill_(3)
    setting.main.synchronize()
    with simulated.held(setting.up):
        setting.optimizer.step()
        stepped = setting.optimizer._copies[setting.weight]
        loading = background.submit(stepped.take_values, torch.full((COUNT,), 9.0))
        assert still_waits(loading)
    loading.result(LIMIT)
    assert all_are(setting.weight.detach(), -2)


@pytest.fixture
def transfers() -> SideStreams:
    return SideStreams(first_device())


def test_up_waits_for_main(transfers: SideStreams) -> None:
    parameter, new = device_memory(1.0), page_locked(2)
    main = torch.accelerator.current_stream()
    with simulated.held(main):
        doubled = parameter * 2
        transfers.begin()
        transfers.up([parameter], [new], transfers.event())
        assert not is_done_soon(streams_of(transfers)[1])
        transfers.end()
    assert all_are(doubled, 2)
    assert all_are(parameter, 2)


def test_main_waits_for_up(transfers: SideStreams) -> None:
    parameter, new = device_memory(1.0), page_locked(2)
    with simulated.held(streams_of(transfers)[1]):
        transfers.begin()
        transfers.up([parameter], [new], transfers.event())
        transfers.end()
        doubled = parameter * 2
        assert not is_done_soon(torch.accelerator.current_stream())
    assert all_are(doubled, 4)


def test_main_waits_for_down(transfers: SideStreams) -> None:
    """After an error, a copy on that stream may still read a gradient that main writes next."""
    gradient, arrived = device_memory(1.0), page_locked(0)
    with simulated.held(streams_of(transfers)[0]):
        transfers.begin()
        transfers.down([arrived], [gradient], transfers.event())
        transfers.end()
        gradient.zero_()
        assert not is_done_soon(torch.accelerator.current_stream())
    torch.accelerator.synchronize()
    assert all_are(arrived, 1)
