"""The simulated device computes the results of the CPU, and torch accepts it as an accelerator."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests import simulated

pytestmark = pytest.mark.gpu

DEVICE = torch.device("simulated", 0)

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arithmetic": lambda x: (x + 2 * x.mean() - x.sum(0, keepdim=True)) @ x.t(),
    "views": lambda x: x.t()[1:, ::2].unfold(0, 2, 1).flatten().view(torch.int32)[3:],
    "complex": lambda x: (torch.complex(x, x + 1).conj() * 2).imag,
    "bfloat16": lambda x: x.bfloat16().softmax(-1).float(),
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "booleans": lambda x: (x > 0).logical_or(x < -1),
    "values decide": lambda x: x[x > 0].nonzero(),
    "indices of the host": lambda x: x[torch.tensor([2, 0])],
    "indices of the device": lambda x: x[:, (x[0] > 0).nonzero()[:, 0]],
    "channels last": lambda x: x.reshape(1, 2, 2, -1).to(memory_format=torch.channels_last) * 2,
    "in place": lambda x: x.clone().clamp_(-0.5, 0.5)[::2].addcmul_(x[::2], x[1::2], value=3).t_(),
    "in two places": lambda x: torch.stack([*x.clone().mul_(3).split(1), x[:1]]),
    "to be sized": lambda x: torch.cat([x, x], out=x.new_empty(0)),
    "lists": lambda x: torch.stack(torch._foreach_add([x, x * 2], [x, x], alpha=2)),
    "empty": lambda x: x[:0] * 2,
    "scalar": lambda x: torch.full_like(x.sum(), x.sum().item()) / 3,
    "number": lambda x: x.bfloat16() * torch.tensor(2.0),
    "normalized": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    "copied": lambda x: copy.deepcopy(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_computes_the_results_of_the_cpu(name: str) -> None:
    x = torch.randn(4, 6)
    expected, found = CALLS[name](x), CALLS[name](x.to(DEVICE))
    assert found.device == DEVICE
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_a_model_is_trained_as_on_the_cpu(make: Callable[..., torch.optim.Optimizer]) -> None:
    results = []
    for device in ("cpu", "simulated"):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 1)]
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = make(model.parameters())
        for step in range(3):
            model(torch.linspace(0, 1 + step, 32).reshape(4, 8).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([value.cpu() for value in model.state_dict().values()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_the_host_dies_where_it_reads_device_memory() -> None:
    program = (
        "import ctypes, torch\n"
        "from tests import simulated\n"
        "simulated.load()\n"
        "address = torch.zeros(4, device='simulated').data_ptr()\n"
        "ctypes.string_at(address, 16)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert run.returncode == -signal.SIGSEGV


def test_tensors_of_two_devices_do_not_mix() -> None:
    x = torch.zeros(3, device=DEVICE)
    for other in (torch.zeros(3), torch.zeros(3, device="simulated:1")):
        with pytest.raises(RuntimeError, match="simulated:0"):
            x.add_(other)
        with pytest.raises(RuntimeError, match="simulated:0"):
            torch.index_select(other, 0, x.long())


def test_failed_work_raises_when_the_host_waits() -> None:
    torch.zeros(3, device=DEVICE).index_fill_(0, torch.tensor([7], device=DEVICE), 1.0)
    with pytest.raises(RuntimeError, match="on the simulated device"):
        torch.accelerator.synchronize(DEVICE)
    torch.accelerator.synchronize(DEVICE)


def test_threads_have_their_own_device_and_streams() -> None:
    side = torch.Stream(DEVICE)
    torch.accelerator.set_device_index(1)
    try:
        with side:
            assert torch.accelerator.current_stream() == side
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.accelerator.current_device_index).result(60) == 0
                assert pool.submit(torch.accelerator.current_stream, DEVICE).result(60) != side
        assert torch.zeros(1, device="simulated").device.index == 1
    finally:
        torch.accelerator.set_device_index(0)


def test_page_locked_memory_is_recognised_by_any_address_within() -> None:
    memory = torch.empty(10_000, dtype=torch.uint8, pin_memory=True)
    assert memory.is_pinned()
    assert torch.frombuffer(memory.numpy().data[9_000:], dtype=torch.uint8).is_pinned()
    assert torch.zeros(3).pin_memory().is_pinned()
    assert not torch.zeros(3).is_pinned()


def test_generators_have_states() -> None:
    torch.manual_seed(5)
    state = torch.simulated.get_rng_state()
    drawn = torch.rand(4, device=DEVICE)
    assert not torch.equal(torch.rand(4, device=DEVICE), drawn)
    torch.simulated.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=DEVICE), drawn)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device=DEVICE), drawn)
    own = torch.Generator(DEVICE).manual_seed(5)
    assert torch.equal(torch.rand(4, device=DEVICE, generator=own), drawn)


def test_a_storage_is_resized() -> None:
    x = torch.arange(6.0, device=DEVICE)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(24)
    x.fill_(3).resize_(2, 6)
    assert x[0].tolist() == [3] * 6


def test_most_operators_do_not_wait() -> None:
    main = torch.accelerator.current_stream(DEVICE)
    x = torch.ones(8, 8, device=DEVICE, requires_grad=True)
    main.synchronize()
    with simulated.held(main):
        (x @ x).relu().add(1).sum().backward()
        assert not main.query()
    assert x.grad is not None and bool((x.grad == 16).all())
