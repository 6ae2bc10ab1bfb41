"""The distributed optimizer in one process equals the plain optimizer, in every setting."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardproof as sp
from shardproof.layouts import vocabulary
from shardproof.rendezvous import LocalRendezvous
from shardproof.state import LocalRange, ParameterSlots, StoredSlot
from shardproof.training.optim.distributed import (
    DistributedOptimizer,
    DynamicLossScale,
    LossScale,
    inner_optimizer,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batches(steps: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator).to(dtype) for _ in range(steps)]


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    for batch in batches(steps, next(net.parameters()).dtype):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [item.detach().clone() for item in net.parameters()]


def slots_by_name(net: nn.Module, optimizer: DistributedOptimizer) -> dict[str, ParameterSlots]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return {names[slots.parameter]: slots for slots in optimizer.describe_slots()}


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


OPTIMIZERS: list[Any] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.NAdam, {"lr": 1e-2}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("shard_gradients", [True, False])
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_equals_the_plain_optimizer(
    kind: Any, options: dict[str, Any], shard_gradients: bool, bucket_bytes: int
) -> None:
    plain, ours = model(), model()
    optimizer = DistributedOptimizer(
        ours, kind, shard_gradients=shard_gradients, bucket_bytes=bucket_bytes, **options
    )
    assert equal(trained(ours, optimizer), trained(plain, kind(plain.parameters(), **options)))


def test_groups_by_function_and_by_list_equal_the_plain_optimizers_groups() -> None:
    def decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": 0.1 if parameter.dim() > 1 else 0.0}

    plain, ours, listed = model(), model(), model()
    by_dim = [
        {"params": [p for p in plain.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = trained(plain, torch.optim.AdamW(by_dim, lr=1e-2))
    assert equal(
        trained(ours, DistributedOptimizer(ours, torch.optim.AdamW, param_groups=decay, lr=1e-2)), reference
    )
    groups = [
        {"params": [p for p in listed.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in listed.named_parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = DistributedOptimizer(listed, torch.optim.AdamW, param_groups=groups, lr=1e-2)
    assert equal(trained(listed, optimizer), reference)


def test_a_scheduler_changes_the_inner_options() -> None:
    plain, ours = model(), model()
    results = []
    for net, optimizer in (
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)),
        (ours, DistributedOptimizer(ours, torch.optim.AdamW, lr=1e-2)),
    ):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for batch in batches(3):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            scheduler.step()
        results.append(list(net.parameters()))
    assert equal(*results)


def test_a_closure_is_called_once() -> None:
    net, calls = model(), []
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1)

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = net(batches(1)[0]).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert calls == [1]


def test_gradients_that_come_without_zero_grad_add_up() -> None:
    plain, ours = model(), model()
    optimizers = [
        torch.optim.SGD(plain.parameters(), lr=0.1),
        DistributedOptimizer(ours, torch.optim.SGD, lr=0.1),
    ]
    for net, optimizer in zip((plain, ours), optimizers, strict=True):
        for batch in batches(3):
            net(batch).square().mean().backward()
            optimizer.step()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_set_by_hand_are_used() -> None:
    net = model()
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0)
    before = [p.detach().clone() for p in net.parameters()]
    net.up.bias.grad = torch.ones(7)
    net.down.bias.decoupled_grad = torch.full((3,), 2.0, dtype=torch.float64)
    optimizer.step()
    after = dict(zip([n for n, _ in net.named_parameters()], before, strict=True))
    assert torch.equal(net.up.bias, after["up.bias"] - 1.0)
    assert torch.equal(net.down.bias, after["down.bias"] - 2.0)
    assert torch.equal(net.up.weight, after["up.weight"])
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(net.up.bias, after["up.bias"] - 1.0), "nothing of last step's gradients is left"


def test_gradients_set_by_hand_after_clipping_are_used() -> None:
    net = model()
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0)
    before = net.up.bias.detach().clone()
    net.up.bias.grad = torch.ones(7)
    optimizer.clip_grad_norm_(100.0)
    net.up.bias.grad = torch.ones(7)
    optimizer.step()
    assert torch.equal(net.up.bias, before - 1.0 - 1.0)


def test_zero_grad_clears_decoupled_gradients() -> None:
    net = model()
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0)
    before = net.up.bias.detach().clone()
    net.up.bias.decoupled_grad = torch.ones(7)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(net.up.bias, before)


def test_a_gradient_of_another_shape_is_refused_by_name() -> None:
    net = model()
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0)
    net.up.bias.decoupled_grad = torch.ones(9)  # would reach into the next parameter
    with pytest.raises(ValueError, match=r"up\.bias has local shape \[7\], and a gradient of .* \[9\]"):
        optimizer.step()


def test_gradients_of_a_thawed_parameter_add_up_in_the_gradient_dtype() -> None:
    net = model(torch.bfloat16)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0, gradient_dtype=torch.float32)
    net.up.bias.requires_grad_(False)
    before = slots_by_name(net, optimizer)["up.bias"].tensors["master"].buffer.clone()
    net.up.bias.requires_grad_(True)
    for gradient in (256.0, 1.0):  # 257 is not a bf16 number
        (net.up.bias * gradient).sum().backward()
    optimizer.step()
    now = slots_by_name(net, optimizer)["up.bias"].tensors["master"].buffer
    assert torch.equal(now, before - 257.0)


@pytest.mark.parametrize("given", [None, lambda *_: {}, "listed"])
def test_a_frozen_parameter_has_no_state_and_no_memory_and_stays_frozen(given: Any, tmp_path: Path) -> None:
    def made(net: nn.Module) -> DistributedOptimizer:
        groups = [{"params": list(net.parameters())}] if given == "listed" else given
        return DistributedOptimizer(net, torch.optim.AdamW, lr=1.0, param_groups=groups)

    net = model(torch.bfloat16)
    net.down.requires_grad_(False)
    optimizer = made(net)
    expected = {"up.weight", "up.bias", "unused.weight", "unused.bias"}
    assert set(slots_by_name(net, optimizer)) == expected
    memory = sum(bucket.parameters.numel() for bucket in optimizer._buckets)
    assert memory < sum(item.numel() for item in net.parameters())
    trained(net, optimizer, 1)
    sp.save(tmp_path / "saved", {"model": net, "optimizer": optimizer})
    net.down.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"down\.weight was frozen when .* make a new optimizer, and load"):
        optimizer.step()
    net = model(torch.bfloat16)
    again = made(net)  # the advice
    sp.load(tmp_path / "saved", {"model": net, "optimizer": again}, strict=False)
    before = net.down.weight.detach().clone()
    trained(net, again, 1)
    assert not torch.equal(net.down.weight, before)
    assert slots_by_name(net, again)["up.weight"].tensors["step"] == 2


def test_full_buffers_are_no_larger_than_their_buckets() -> None:
    net = nn.Sequential(nn.Linear(100, 100, bias=False), *[nn.Linear(4, 4, bias=False) for _ in range(8)])
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0, bucket_bytes=1)
    for _ in range(2):
        with optimizer.no_sync():
            sum((p.sum() for p in net.parameters()), torch.zeros(())).backward()
        held = sum(bucket.full.numel() for bucket in optimizer._buckets if bucket.full is not None)
        assert held == sum(p.numel() for p in net.parameters())
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_of_gradients_in_any_dtype(dtype: torch.dtype) -> None:
    net = model(dtype)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0)
    net.up.bias.grad = torch.full((7,), 2.0, dtype=dtype)
    norm = optimizer.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(float(norm), 2.0 * 7**0.5)


def test_clipping_equals_torchs() -> None:
    plain, ours = model(), model()
    optimizer = DistributedOptimizer(ours, torch.optim.SGD, lr=0.1, bucket_bytes=64)
    (plain(batches(1)[0]) * 10).sum().backward()
    (ours(batches(1)[0]) * 10).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), norm)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    optimizer.step()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_zeros_are_counted_without_padding_and_without_parameters_that_have_no_gradient() -> None:
    net = model()
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    net.up.weight.grad = torch.tensor([[0.0, 1.0, 0.0, 2.0, 3.0]] * 7)
    assert optimizer.count_zero_gradients() == 14


def hand_written(net: nn.Module, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """bf16 parameters with fp32 masters, by hand."""
    masters = [p.detach().float().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for batch in batches(steps, torch.bfloat16):
        net(batch).square().mean().backward()
        for master, p in zip(masters, net.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, net.parameters(), strict=True):
                p.copy_(master)
    return [p.detach() for p in net.parameters()], masters


def test_bf16_with_masters_equals_the_hand_written_loop() -> None:
    reference, ours = model(torch.bfloat16), model(torch.bfloat16)
    parameters, masters = hand_written(reference, 5)
    optimizer = DistributedOptimizer(ours, torch.optim.AdamW, lr=1e-2)
    assert equal(trained(ours, optimizer, 5), parameters)
    described = slots_by_name(ours, optimizer)
    for (name, _), master in zip(ours.named_parameters(), masters, strict=True):
        assert torch.equal(described[name].tensors["master"].buffer, master.flatten())


def test_without_masters_the_parameters_themselves_are_stepped() -> None:
    plain, ours = model(torch.bfloat16), model(torch.bfloat16)
    optimizer = DistributedOptimizer(ours, torch.optim.AdamW, lr=1e-2, master_dtype=None)
    assert equal(trained(ours, optimizer), trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)))
    assert "master" not in slots_by_name(ours, optimizer)["up.weight"].tensors


@pytest.mark.parametrize("chunk", [3, 1 << 22])
def test_raised_state_in_fp32_equals_direct(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_optimizer, "_CHUNK", chunk)
    direct, raised = model(torch.bfloat16), model(torch.bfloat16)
    one = DistributedOptimizer(direct, torch.optim.AdamW, lr=1e-2)
    two = DistributedOptimizer(
        raised,
        torch.optim.AdamW,
        lr=1e-2,
        state_dtypes={"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    )
    assert equal(trained(direct, one), trained(raised, two))
    theirs = slots_by_name(direct, one)
    for name, slots in slots_by_name(raised, two).items():
        assert slots.kind == "AdamW"
        assert slots.tensors.keys() == theirs[name].tensors.keys()
        for slot, item in slots.tensors.items():
            other = theirs[name].tensors[slot]
            assert torch.equal(getattr(item, "buffer", item), getattr(other, "buffer", other)), (name, slot)


def test_precision_aware_state_equals_rounding_after_every_step() -> None:
    ours = model(torch.bfloat16)
    optimizer = DistributedOptimizer(
        ours,
        torch.optim.AdamW,
        lr=1e-2,
        gradient_dtype=torch.float32,
        master_dtype=torch.float16,
        state_dtypes={"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float16},
    )
    net = model(torch.bfloat16)
    rounded: dict[str, dict[str, torch.Tensor]] = {
        n: {"master": p.detach().to(torch.float16)} for n, p in net.named_parameters()
    }
    for batch in batches(3, torch.bfloat16):
        net(batch).square().mean().backward()
        for name, p in net.named_parameters():
            if p.grad is None:
                continue
            value = rounded[name]["master"].float()
            value.grad = p.grad.float()
            inner = torch.optim.AdamW([value], lr=1e-2)
            if "step" in rounded[name]:
                inner.state[value] = {
                    "step": rounded[name]["step"],
                    "exp_avg": rounded[name]["exp_avg"].float(),
                    "exp_avg_sq": rounded[name]["exp_avg_sq"].float(),
                }
            inner.step()
            state = inner.state[value]
            rounded[name] = {
                "master": value.to(torch.float16),
                "step": state["step"],
                "exp_avg": state["exp_avg"].to(torch.bfloat16),
                "exp_avg_sq": state["exp_avg_sq"].to(torch.float16),
            }
            p.data.copy_(rounded[name]["master"])
            p.grad = None
    trained(ours, optimizer, 3)
    for name, slots in slots_by_name(ours, optimizer).items():
        assert slots.tensors.keys() == rounded[name].keys()
        for slot, expected in rounded[name].items():
            item = slots.tensors[slot]
            item = item.buffer if isinstance(item, LocalRange) else item
            assert item.dtype == expected.dtype
            assert torch.equal(item, expected.flatten() if expected.dim() else expected), (name, slot)
    assert equal(list(ours.parameters()), list(net.parameters()))


def test_a_slot_that_the_optimizer_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state_dtypes names \['exp_average'\]; .*'exp_avg', 'exp_avg_sq'"):
        DistributedOptimizer(model(), torch.optim.AdamW, state_dtypes={"exp_average": torch.bfloat16})


def test_an_optimizer_that_is_not_elementwise_is_refused() -> None:
    with pytest.raises(ValueError, match="not elementwise"):
        DistributedOptimizer(model(), torch.optim.Adafactor)


def test_before_the_first_step_there_are_masters_and_nothing_else() -> None:
    net = model(torch.bfloat16)
    optimizer = DistributedOptimizer(net, torch.optim.AdamW)
    generator = torch.get_rng_state()
    described = slots_by_name(net, optimizer)
    assert all(slots.tensors.keys() == {"master"} for slots in described.values())
    assert len(described) == 6
    assert torch.equal(torch.get_rng_state(), generator)
    plain = slots_by_name(fp32 := model(), DistributedOptimizer(fp32, torch.optim.AdamW))
    assert all(slots.tensors == {} for slots in plain.values())


def test_a_parameter_without_gradients_has_no_slots_and_is_not_decayed() -> None:
    net = model()
    before = net.unused.weight.detach().clone()
    optimizer = DistributedOptimizer(net, torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    trained(net, optimizer)
    assert torch.equal(net.unused.weight, before)
    described = slots_by_name(net, optimizer)
    assert described["unused.weight"].tensors == {}
    assert described["up.weight"].tensors.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert float(described["up.weight"].tensors["step"]) == 4.0
    assert described["up.weight"].options["weight_decay"] == 0.5
    assert described["up.weight"].kind == "AdamW"


def move(source: DistributedOptimizer, target: DistributedOptimizer, skip: tuple[str, ...] = ()) -> None:
    """Transfers the state as a save and a load do, without a checkpoint."""
    theirs = [item for group in target.param_groups for item in group["params"]]
    order = [item for group in source.param_groups for item in group["params"]]
    for slots in source.describe_slots():
        parameter = theirs[next(i for i, item in enumerate(order) if item is slots.parameter)]
        stored = {}
        for slot, item in slots.tensors.items():
            if slot not in skip:
                ranged = isinstance(item, LocalRange)
                tensor = item.buffer if ranged else item
                stored[slot] = StoredSlot(tensor.dtype, tuple(parameter.shape) if ranged else ())
        receipt = target.receive_slots(parameter, stored)
        filled = set()
        for slot in receipt.tensors.keys() & stored.keys():
            mine, other = receipt.tensors[slot], slots.tensors[slot]
            mine = mine.buffer if isinstance(mine, LocalRange) else mine
            other = other.buffer if isinstance(other, LocalRange) else other
            mine.copy_(other.view(mine.shape))
            filled.add(slot)
        receipt.attach(slots.values, frozenset(filled))


@pytest.mark.parametrize("dtypes", [{}, {"exp_avg": torch.bfloat16}])
@pytest.mark.parametrize("steps", [0, 3])
def test_state_moves_to_another_optimizer_and_training_goes_on_as_before(
    dtypes: dict[str, torch.dtype], steps: int
) -> None:
    make = partial(DistributedOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-2, state_dtypes=dtypes)
    first = model(torch.bfloat16)
    one = make(first)
    trained(first, one, steps)
    second = copy.deepcopy(first)
    two = make(second)
    move(one, two)
    assert equal(trained(first, one), trained(second, two))
    ours, theirs = slots_by_name(first, one), slots_by_name(second, two)
    for name, slots in ours.items():
        for slot, item in slots.tensors.items():
            other = theirs[name].tensors[slot]
            assert torch.equal(getattr(item, "buffer", item), getattr(other, "buffer", other)), (name, slot)


def test_receiving_touches_nothing_before_attach() -> None:
    net = model(torch.bfloat16)
    optimizer = DistributedOptimizer(
        net, torch.optim.AdamW, lr=1e-2, state_dtypes={"exp_avg": torch.bfloat16}
    )
    trained(net, optimizer)
    held = slots_by_name(net, optimizer)["up.weight"]
    before = {slot: getattr(item, "buffer", item).clone() for slot, item in held.tensors.items()}
    stored = {
        "exp_avg": StoredSlot(torch.float32, (7, 5)),
        "master": StoredSlot(torch.float32, (7, 5)),
        "step": StoredSlot(torch.float32, ()),
    }
    receipt = optimizer.receive_slots(net.up.weight, stored)
    for item in receipt.tensors.values():
        getattr(item, "buffer", item).fill_(7.0)
    assert receipt.tensors["exp_avg"].buffer.dtype == torch.bfloat16
    now = slots_by_name(net, optimizer)["up.weight"].tensors
    assert all(torch.equal(before[slot], getattr(item, "buffer", item)) for slot, item in now.items())
    receipt.attach({}, frozenset(stored))
    now = slots_by_name(net, optimizer)["up.weight"].tensors
    assert now.keys() == {"master", "exp_avg", "step"}, "the state becomes what was stored"
    assert float(now["master"].buffer[0]) == 7.0


def test_a_master_that_is_not_stored_is_taken_from_the_parameter() -> None:
    net = model(torch.bfloat16)
    optimizer = DistributedOptimizer(net, torch.optim.AdamW, lr=1e-2)
    trained(net, optimizer)
    for parameter in net.parameters():
        optimizer.receive_slots(parameter, {}).attach({}, frozenset())
    for slots in optimizer.describe_slots():
        assert slots.tensors.keys() == {"master"}
        assert torch.equal(slots.tensors["master"].buffer, slots.parameter.detach().flatten().float())


def test_stored_masters_fill_fp32_parameters_but_not_padding(tmp_path: Path) -> None:
    def table(dtype: torch.dtype, seed: int) -> tuple[torch.nn.Embedding, DistributedOptimizer]:
        torch.manual_seed(seed)
        net = torch.nn.Embedding(8, 4).to(dtype)
        vocabulary(net, "weight", 6)
        return net, DistributedOptimizer(net, torch.optim.AdamW)

    net, optimizer = table(torch.bfloat16, 0)
    slots_by_name(net, optimizer)["weight"].tensors["master"].buffer.add_(1e-4)
    exact = slots_by_name(net, optimizer)["weight"].tensors["master"].buffer.clone().view(8, 4)
    sp.save(tmp_path / "step", {"model": net, "optimizer": optimizer})
    for dtype in (torch.float32, torch.bfloat16):
        net, optimizer = table(dtype, 1)
        before = net.weight.detach().clone()
        sp.load(tmp_path / "step", {"model": net, "optimizer": optimizer}, cast=True)
        assert torch.equal(net.weight[:6], exact[:6].to(dtype))
        assert torch.equal(net.weight[6:], before[6:])
        if dtype == torch.bfloat16:
            master = slots_by_name(net, optimizer)["weight"].tensors["master"].buffer.view(8, 4)
            assert torch.equal(master[:6], exact[:6]) and torch.equal(master[6:], before[6:].float())


def test_a_model_load_is_not_undone_by_stale_masters() -> None:
    net = model(torch.bfloat16)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=2.0**-6)
    trained(net, optimizer, 2)
    exact = slots_by_name(net, optimizer)["up.weight"].tensors["master"].buffer.clone()
    with torch.no_grad():
        net.up.weight.data.view(-1)[3] = 5.0  # as a load writes: not through autograd
    torch.autograd.graph.increment_version(net.up.weight)
    optimizer.zero_grad()
    net.up.weight.grad = torch.zeros_like(net.up.weight)
    optimizer.step()
    now = slots_by_name(net, optimizer)["up.weight"].tensors["master"].buffer
    exact[3] = 5.0
    assert torch.equal(now, exact), "the written element, and no other"
    assert float(net.up.weight.detach().flatten()[3]) == 5.0


def test_masters_are_described_as_the_weights_loaded_after_the_last_step() -> None:
    net = model(torch.bfloat16)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=2.0**-6)
    trained(net, optimizer, 2)
    with torch.no_grad():
        net.up.weight.fill_(5.0)
    assert (slots_by_name(net, optimizer)["up.weight"].tensors["master"].buffer == 5.0).all()


def test_masters_stay_exact_where_only_the_optimizer_writes() -> None:
    net = model(torch.bfloat16)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1e-5)
    before = slots_by_name(net, optimizer)["up.bias"].tensors["master"].buffer.clone()
    for _ in range(3):
        optimizer.zero_grad()
        net.up.bias.grad = torch.ones(7, dtype=torch.bfloat16)
        optimizer.step()
    now = slots_by_name(net, optimizer)["up.bias"].tensors["master"].buffer
    torch.testing.assert_close(now, before - 3e-5, rtol=1e-6, atol=0)


def test_empty_shards_of_one_bucket_are_not_taken_for_tied(tmp_path: Path) -> None:
    """Two of the four tensor parallel ranks have no row: their shards are empty views of one bucket."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    source = nn.ModuleList(nn.Linear(64, 2, bias=False) for _ in range(2))
    sp.save(tmp_path / "step", {"model": source})

    def load() -> list[tuple[int, ...]]:
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(4, 1), mesh_dim_names=("tp", "dp"))
        target = nn.ModuleList(nn.Linear(64, 2, bias=False) for _ in range(2))
        for part in target:
            whole = part.weight.detach()
            part.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
        DistributedOptimizer(target, torch.optim.AdamW, process_group=mesh.get_group("dp"))
        sp.load(tmp_path / "step", {"model": target}, rendezvous=LocalRendezvous())
        return [tuple(part.weight.to_local().shape) for part in target]

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        # A thread of its own, because torch caches layouts per thread.
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(load).result() == [(0, 64)] * 2
    finally:
        dist.destroy_process_group()


def test_an_inf_skips_the_step_and_shrinks_the_scale() -> None:
    net = model()
    scale = DynamicLossScale(8.0, interval=2)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=1.0, loss_scale=scale)
    before = net.up.bias.detach().clone()
    net.up.bias.grad = torch.tensor([1.0, float("inf"), 0, 0, 0, 0, 0])
    optimizer.step()
    assert optimizer.skipped
    assert torch.equal(net.up.bias, before)
    assert scale.value == 4.0
    optimizer.zero_grad()
    optimizer.scale(net.up.bias.sum()).backward()
    optimizer.step()
    assert not optimizer.skipped
    assert torch.equal(net.up.bias, before - 1.0), "gradients are divided by the scale"
    assert optimizer.describe_shared() == {"loss_scale": {"value": 4.0, "finite_steps": 1}}
    other = DistributedOptimizer(model(), torch.optim.SGD, lr=1.0, loss_scale=DynamicLossScale())
    other.receive_shared(optimizer.describe_shared())
    assert other.describe_shared() == optimizer.describe_shared()


def test_fp16_gradients_are_unscaled_in_fp32() -> None:
    """In fp16 they would be zero."""
    net = nn.Linear(1, 1, bias=False).half()
    nn.init.ones_(net.weight)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=2.0**10, loss_scale=2.0**30)
    net.weight.grad = torch.full((1, 1), 4.0, dtype=torch.float16)
    optimizer.step()
    (slots,) = optimizer.describe_slots()
    assert float(slots.tensors["master"].buffer) == 1.0 - 2.0**-18


def test_a_fixed_scale_stays() -> None:
    scale = LossScale(4.0)
    scale.update(found_inf=True)
    scale.receive({"value": 9.0})
    assert scale.value == 4.0
    with pytest.raises(ValueError, match="above 0"):
        LossScale(0.0)
    with pytest.raises(ValueError, match="backoff"):
        DynamicLossScale(backoff=2.0)


@pytest.mark.parametrize("shard_gradients", [True, False])
def test_gradients_reduced_during_backward_use_the_scale_of_their_loss(shard_gradients: bool) -> None:
    plain, ours = model(), model()
    scale = DynamicLossScale(16.0, interval=1)
    optimizer = DistributedOptimizer(
        ours, torch.optim.SGD, lr=0.1, bucket_bytes=1, loss_scale=scale, shard_gradients=shard_gradients
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches(3):
        reference.zero_grad()
        plain(batch).square().mean().backward()
        reference.step()
        optimizer.zero_grad()
        optimizer.scale(ours(batch).square().mean()).backward()
        optimizer.step()
    assert scale.value == 128.0
    assert equal(list(ours.parameters()), list(plain.parameters())), "the scales are powers of two"


def test_a_copy_of_the_model_runs_beside_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.5)
    average = copy.deepcopy(model)
    x = torch.ones(1, 3)
    assert torch.equal(average(x), model(x))
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(average(x), model(x))


def test_a_moved_parameter_is_refused_by_name() -> None:
    net = model()
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    net.up.weight.data = net.up.weight.data.clone()
    net(batches(1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"up\.weight is no longer in the optimizer's flat buffer"):
        optimizer.step()


def test_a_parameter_that_its_module_has_replaced_is_refused_by_name() -> None:
    net = model()
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    net.load_state_dict({name: item.clone() for name, item in net.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"up\.weight is no longer in the optimizer's flat buffer"):
        optimizer.step()


def test_invalid_arguments_are_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="no parameter"):
        DistributedOptimizer(net.requires_grad_(False), torch.optim.SGD, lr=0.1)
    net = model()
    with pytest.raises(ValueError, match=r"not the module's, of shapes \[\[2\]\]"):
        DistributedOptimizer(
            net, torch.optim.SGD, lr=0.1, param_groups=[{"params": nn.Parameter(torch.zeros(2))}]
        )
    with pytest.raises(ValueError, match="meta device"):
        DistributedOptimizer(nn.Linear(2, 2, device="meta"), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="in two groups"):
        DistributedOptimizer(
            net,
            torch.optim.SGD,
            lr=0.1,
            param_groups=[{"params": [net.up.bias]}, {"params": [net.up.bias]}],
        )
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match=r"shardproof\.save"):
        optimizer.state_dict()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="weight has a sparse gradient"):
        net(torch.tensor([1])).sum().backward()
    del optimizer


def test_a_deleted_optimizer_does_not_touch_gradients() -> None:
    net = model()
    DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    net(batches(1)[0]).sum().backward()
    assert net.up.weight.grad is not None


def test_channels_last_and_scalar_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) * self.gain

    torch.manual_seed(0)
    plain = Odd()
    ours = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5)
    optimizer = DistributedOptimizer(ours, torch.optim.AdamW, lr=0.1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for net, other in ((ours, optimizer), (plain, reference)):
        for _ in range(2):
            other.zero_grad()
            net(x).square().mean().backward()
            other.step()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    gain = slots_by_name(ours, optimizer)["gain"].tensors
    assert gain["exp_avg"].stop == 1
    assert gain["step"].shape == ()


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_is_refused_and_the_loss_scale_that_it_names_works(unscales: bool) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"loss_scale=DynamicLossScale\(\)"):
        scaler.step(optimizer)
    optimizer.step()  # without the scaler
    off = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    off.scale(net(torch.ones(1, 2)).sum()).backward()
    before = net.weight.detach().clone()
    off.step(optimizer)
    assert not torch.equal(net.weight, before)

    scaled = DistributedOptimizer(
        torch.nn.Linear(2, 1), torch.optim.SGD, lr=0.1, loss_scale=DynamicLossScale()
    )
    (weight, _) = scaled.param_groups[0]["params"]
    scaled.scale(weight.sum() * float("inf")).backward()
    scaled.step()
    assert scaled.skipped


def test_strides_that_flat_buffers_do_not_have_are_named() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Conv2d(3, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedOptimizer(net, torch.optim.SGD, lr=0.1)
    last = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Conv2d(3, 4, 3))
    last.to(memory_format=torch.channels_last)
    with pytest.warns(
        UserWarning, match=r"DistributedOptimizer moves 1 parameters .* The first is 1\.weight"
    ):
        DistributedOptimizer(last, torch.optim.SGD, lr=0.1)
    remedied = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remedied.to(memory_format=torch.contiguous_format)
        DistributedOptimizer(remedied, torch.optim.SGD, lr=0.1)
