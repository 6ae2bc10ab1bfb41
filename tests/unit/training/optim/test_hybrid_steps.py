"""Steps of the hybrid optimizer equal those of the plain optimizer, for every fraction."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.optim import HybridDeviceOptimizer
from shardproof.training.optim.hybrid import sides
from shardproof.training.optim.hybrid.sides import DeviceSplit
from shardproof.training.optim.hybrid.stepped_copy import SteppedCopy
from tests.unit.training.optim.hybrid_samples import (
    RULES,
    equal,
    fill_gradients,
    hybrid,
    late_copies,
    model_of,
    plain,
    train,
    values,
)

FRACTIONS = [0.0, 0.3, 0.5, 1.0]


@pytest.mark.parametrize("kind", sorted(RULES))
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_it_equals_the_plain_optimizer_bit_for_bit(kind: str, fraction: float) -> None:
    reference, model = model_of(), model_of()
    train(reference, plain(reference, kind), 0, 5)
    train(model, hybrid(model, kind, fraction), 0, 5)
    assert equal(values(model), values(reference))
    assert not equal(values(model), values(model_of()))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_masters_equal_a_run_in_float32(fraction: float) -> None:
    """Gradients are bfloat16 numbers in both runs; the masters are what an fp32 model would be."""
    model = model_of(torch.bfloat16)
    wide = model_of(torch.bfloat16).float()
    optimizer, reference = hybrid(model, fraction=fraction, master_dtype=torch.float32), plain(wide)
    for step in range(5):
        fill_gradients(model, step)
        for weight, other in zip(model.parameters(), wide.parameters(), strict=True):
            other.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    masters = [slots.tensors["master"] for slots in optimizer.describe_slots()]
    assert equal(masters, values(wide))  # type: ignore[arg-type]
    assert equal(values(model), [weight.bfloat16() for weight in values(wide)])


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_step_waits_for_its_copies(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run only when they are waited for: a missing wait would leave NaN in the parameters."""
    monkeypatch.setattr(sides, "_BUCKET_BYTES", 1)  # each parameter is a bucket
    log = late_copies(monkeypatch)
    reference, model = model_of(torch.bfloat16), model_of(torch.bfloat16)
    optimizer = hybrid(model, fraction=fraction, master_dtype=torch.float32)
    train(model, optimizer, 0, 3)
    monkeypatch.undo()
    train(reference, hybrid(reference, fraction=0.0, master_dtype=torch.float32), 0, 3)
    assert equal(values(model), values(reference))
    on_cpu = sum(optimizer.is_on_cpu(weight) for weight in model.parameters())
    assert log.count("down") == log.count("up") == 3 * on_cpu
    assert log.count("wait up") == 2 * on_cpu  # before the host overwrites the source of a copy
    if fraction == 1.0:  # all copies begin before the first wait, and each is waited for alone
        assert log[: 1 + on_cpu] == ["begin"] + ["down"] * on_cpu
        assert [entry for entry in log if entry != "wait up"][1 + on_cpu :][: 2 * on_cpu] == [
            "wait down",
            "up",
        ] * on_cpu


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_are_freed_by_the_end_of_the_step(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of a failed step holds none, and gradients of the device are freed once they are cast."""
    model = model_of(torch.bfloat16)
    optimizer = hybrid(model, master_dtype=torch.float32)
    gradients: list[tuple[bool, weakref.ref[torch.Tensor]]] = []

    original = SteppedCopy.gradient

    def cloned(self: SteppedCopy) -> torch.Tensor:
        found = original(self)
        assert found is not None
        new = found.clone()
        gradients.append((self.on_cpu, weakref.ref(new)))
        return new

    def check_freed(*_: Any) -> None:
        assert not any(found() is not None for on_cpu, found in gradients if not on_cpu)
        if fails:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(SteppedCopy, "gradient", cloned)
    optimizer._subs.on_device.register_step_pre_hook(check_freed)  # type: ignore[union-attr]
    fill_gradients(model, 0)
    raised = None
    try:
        optimizer.step()
    except torch.OutOfMemoryError as error:
        raised = error
    assert (raised is not None) == fails
    assert len(gradients) == len(list(model.parameters()))
    assert [found() for _, found in gradients] == [None] * len(gradients)


def test_the_device_steps_while_gradients_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    log = late_copies(monkeypatch)
    model = model_of()
    optimizer = hybrid(model)
    optimizer._subs.on_device.register_step_pre_hook(lambda *_: log.append("device step"))  # type: ignore[union-attr]
    train(model, optimizer, 0, 1)
    assert log.index("device step") > max(at for at, entry in enumerate(log) if entry == "down")
    assert log.index("device step") < log.index("wait down")


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_gradient_is_cast_before_the_device_steps_and_on_its_stream() -> None:
    model = model_of(torch.bfloat16)
    optimizer = hybrid(model, "lion", fraction=0.0, master_dtype=torch.float32)
    train(model, optimizer, 0, 1)
    fill_gradients(model, 1)
    with Recorder() as recorder:
        optimizer.step()
    count = len(list(model.parameters()))
    casts = [at for at, name in enumerate(recorder.names) if name == "_to_copy"]
    first_update = recorder.names.index("mul_")
    assert len(casts) == count and max(casts) < first_update
    assert recorder.names[first_update:].count("copy_") == count  # and the parameters after


def test_a_parameter_without_gradient_is_not_stepped_with_the_last_one() -> None:
    for fraction in FRACTIONS:
        reference, model = model_of(), model_of()
        optimizers = plain(reference), hybrid(model, fraction=fraction)
        for network, optimizer in zip((reference, model), optimizers, strict=True):
            train(network, optimizer, 0, 2)
            fill_gradients(network, 2)
            network[0].weight.grad = None
            network[2].weight.grad = None
            optimizer.step()
        assert equal(values(model), values(reference))
        assert optimizers[1].state[model[0].weight]["step"] == 2
        assert optimizers[1].state[model[3].weight]["step"] == 3


def test_a_zero_gradient_is_a_gradient() -> None:
    model = model_of()
    optimizer = hybrid(model, fraction=1.0)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_decoupled_gradients_are_used_and_cleared(fraction: float) -> None:
    model, wide = model_of(torch.bfloat16), model_of(torch.bfloat16).float()
    optimizer, reference = hybrid(model, fraction=fraction, master_dtype=torch.float32), plain(wide)
    generator = torch.Generator().manual_seed(3)
    for weight, other in zip(model.parameters(), wide.parameters(), strict=True):
        other.grad = torch.randn(weight.shape, generator=generator)
        weight.decoupled_grad = other.grad.clone()  # type: ignore[attr-defined]
        weight.grad = torch.full_like(weight, torch.nan)
    optimizer.step()
    reference.step()
    assert equal([slots.tensors["master"] for slots in optimizer.describe_slots()], values(wide))  # type: ignore[arg-type]
    optimizer.zero_grad(set_to_none=False)
    assert not any(weight.decoupled_grad.any() or weight.grad.any() for weight in model.parameters())
    optimizer.zero_grad()
    assert all(weight.decoupled_grad is None and weight.grad is None for weight in model.parameters())


def test_a_decoupled_gradient_of_another_shape_is_refused() -> None:
    model = model_of()
    model[0].weight.decoupled_grad = torch.zeros(3)
    with pytest.raises(ValueError, match=r"local shape \[7, 5\].*\[3\]"):
        hybrid(model).step()


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_schedulers_reach_both_sides(fraction: float) -> None:
    results = []
    for build in (plain, lambda network: hybrid(network, fraction=fraction)):
        model = model_of()
        optimizer = build(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)  # betas too
        for step in range(5):
            train(model, optimizer, step, step + 1)
            scheduler.step()
        results.append(values(model))
    assert equal(*results)


def test_a_learning_rate_that_is_a_tensor_changes_in_place() -> None:
    results = []
    for build in (
        torch.optim.AdamW,
        lambda params, **o: HybridDeviceOptimizer(params, torch.optim.AdamW, **o),
    ):
        model, rate = model_of(), torch.tensor(0.1)
        optimizer = build(model.parameters(), lr=rate, fused=True)
        train(model, optimizer, 0, 1)
        rate.fill_(0.01)
        train(model, optimizer, 1, 2)
        results.append(values(model))
    assert equal(*results)


def test_a_closure_is_called_once_with_gradients_on() -> None:
    model = model_of()
    optimizer = hybrid(model)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert len(optimizer.state) == len(list(model.parameters()))


def test_groups_keep_their_options_and_later_groups_join() -> None:
    results, names = [], []
    for build in (
        torch.optim.AdamW,
        lambda params, **o: HybridDeviceOptimizer(params, torch.optim.AdamW, **o),
    ):
        model = model_of()
        optimizer = build([{"params": model[0].parameters(), "weight_decay": 0.5}], lr=0.1, fused=True)
        train(model[0], optimizer, 0, 2)
        before = {weight: optimizer.is_on_cpu(weight) for weight in model[0].parameters()} if results else {}
        optimizer.add_param_group({"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.3})
        train(model, optimizer, 2, 4)
        results.append(values(model))
        names.append([group["lr"] for group in optimizer.param_groups])
        assert all(optimizer.is_on_cpu(weight) == side for weight, side in before.items())
    assert equal(*results)
    assert names[0] == names[1]


def test_a_refused_group_leaves_nothing_behind() -> None:
    model = model_of()
    optimizer = hybrid(model)
    with pytest.raises(ValueError, match="meta"):
        optimizer.add_param_group({"params": [torch.zeros(500, device="meta") for _ in range(2)]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, 0, 1)
    extra = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer.add_param_group({"params": extra})
    reference = model_of()
    again = hybrid(reference)
    others = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    again.add_param_group({"params": others})
    assert [optimizer.is_on_cpu(p) for p in extra] == [again.is_on_cpu(p) for p in others]


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as some optimizers without schedules do, and uses the count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["count"] = 0
        self.defaults["count"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            group["weight_decay"] = 0.1 * group["count"]
        return super().step(closure)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_options_that_a_step_changes_are_in_the_groups(fraction: float) -> None:
    reference, model = model_of(), model_of()
    plain_one = Counting(reference.parameters())
    optimizer = HybridDeviceOptimizer(model.parameters(), Counting, cpu_fraction=fraction)
    train(reference, plain_one, 0, 3)
    train(model, optimizer, 0, 3)
    assert optimizer.param_groups[0]["count"] == 3
    assert equal(values(model), values(reference))


def test_the_side_depends_on_order_and_global_shapes_alone() -> None:
    sizes = [64, 8, 8, 128, 1, 256, 32, 0]
    for fraction in (0.0, 0.1, 0.5, 0.77, 1.0):
        sides = DeviceSplit(fraction)
        chosen = [sides.on_cpu(torch.empty(size)) for size in sizes]
        share = sum(size for size, on_cpu in zip(sizes, chosen, strict=True) if on_cpu)
        assert abs(share - fraction * sum(sizes)) <= max(sizes) / 2 + 1
        assert all(chosen) == (fraction == 1.0) and any(chosen) == (fraction > 0.0)
    with pytest.raises(ValueError, match="cpu_fraction is 1.5"):
        DeviceSplit(1.5)


def test_the_cpu_side_has_memory_of_its_own() -> None:
    model = model_of()
    optimizer = hybrid(model, fraction=1.0)
    assert all(
        stepped.tensor.data_ptr() != weight.data_ptr() and stepped.tensor.device.type == "cpu"
        for weight, stepped in optimizer._copies.items()
    )


def test_each_side_may_have_a_class_of_its_own() -> None:
    """Each side uses its own class, with the options that the class has."""
    model, reference = model_of(), model_of()
    optimizer = hybrid(model, cpu_optimizer_class=torch.optim.SGD)
    train(model, optimizer, 0, 3)
    on_cpu = [weight for weight in model.parameters() if optimizer.is_on_cpu(weight)]
    sides = [optimizer.is_on_cpu(weight) for weight in model.parameters()]
    weights = list(reference.parameters())
    adam = torch.optim.AdamW(
        [w for w, side in zip(weights, sides, strict=True) if not side], **RULES["adamw"][1]
    )
    sgd = torch.optim.SGD(
        [w for w, side in zip(weights, sides, strict=True) if side], lr=0.02, weight_decay=0.1
    )
    for step in range(3):
        fill_gradients(reference, step)
        adam.step()
        sgd.step()
    assert 0 < len(on_cpu) < len(weights)
    assert equal(values(model), values(reference))
    kinds = {slots.kind for slots in optimizer.describe_slots()}
    assert kinds == {"AdamW", "SGD"}


def test_two_classes_of_one_rule_have_one_name() -> None:
    optimizer = hybrid(model_of(), cpu_optimizer_class=torch.optim.Adam)
    assert {slots.kind for slots in optimizer.describe_slots()} == {"AdamW"}


def test_an_optimizer_that_calls_its_closure_repeatedly_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS calls its closure"):
        HybridDeviceOptimizer(model_of().parameters(), torch.optim.LBFGS)


def test_an_optimizer_that_is_not_elementwise_steps_whole_parameters() -> None:
    reference, model = model_of(), model_of()
    train(reference, torch.optim.Adafactor(reference.parameters()), 0, 3)
    train(model, HybridDeviceOptimizer(model.parameters(), torch.optim.Adafactor), 0, 3)
    assert equal(values(model), values(reference))


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="is on cpu, not on meta"):
        hybrid(model_of(), device="meta")


def test_writes_to_parameters_between_steps_are_followed() -> None:
    """A clamp, a write through .data, which changes no version, and new memory."""
    for fraction in FRACTIONS:
        reference, model = model_of(), model_of()
        optimizers = plain(reference), hybrid(model, fraction=fraction)
        for network, optimizer in zip((reference, model), optimizers, strict=True):
            train(network, optimizer, 0, 2)
            with torch.no_grad():
                network[0].weight.clamp_(-0.1, 0.1)
            train(network, optimizer, 2, 3)
            network[2].weight.data.mul_(0.5)
            if isinstance(optimizer, HybridDeviceOptimizer):
                optimizer.refresh(uncounted=True)
            train(network, optimizer, 3, 4)
            for weight in network.parameters():
                weight.data = weight.data.clone()
            train(network, optimizer, 4, 5)
        assert equal(values(model), values(reference))


def test_autograd_sees_that_parameters_changed() -> None:
    """A backward through a forward from before the step fails, as with any optimizer."""
    for fraction in FRACTIONS:
        model = model_of()
        optimizer = hybrid(model, fraction=fraction)
        loss = model(torch.ones(1, 5)).sum()
        train(model, optimizer, 0, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_failing_step_leaves_no_gradient_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    log = late_copies(monkeypatch)
    model = model_of()
    optimizer = hybrid(model, fraction=1.0)
    train(model, optimizer, 0, 1)
    fill_gradients(model, 1)

    def fail(*_: Any) -> None:
        raise OSError("no power")

    copies = optimizer._copies
    first = copies[model[0].weight].optimizer
    handle = first.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no power"):
        optimizer.step()
    handle.remove()
    assert log[-1] == "end"
    assert all(stepped.tensor.grad is None for stepped in copies.values())


def test_a_sparse_gradient_on_the_cpu_side_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = HybridDeviceOptimizer(embedding.parameters(), torch.optim.SGD, cpu_fraction=1.0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradient"):
        optimizer.step()


def test_pickling_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        hybrid(model_of()).__getstate__()


class Picky(torch.optim.SGD):
    """Refuses complex parameters when it is made, as optimizers written for the CPU may."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        if any(weight.is_complex() for group in self.param_groups for weight in group["params"]):
            raise ValueError("no complex parameters here")


def test_a_group_that_the_cpu_side_refuses_is_not_stepped() -> None:
    on_cpu, on_device = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = HybridDeviceOptimizer([on_cpu], torch.optim.SGD, cpu_optimizer_class=Picky, lr=0.1)
    refused = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    with pytest.raises(ValueError, match="no complex"):
        optimizer.add_param_group({"params": [on_device, refused]})
    on_device.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(on_device, torch.ones(4))
    optimizer.add_param_group({"params": [on_device]})
    assert not optimizer.is_on_cpu(on_device)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_programs_default_device_does_not_matter(fraction: float) -> None:
    reference, model = model_of(), model_of()
    with torch.device("meta"):
        optimizer = hybrid(model, fraction=fraction)
    train(reference, plain(reference), 0, 2)
    train(model, optimizer, 0, 2)
    assert equal(values(model), values(reference))
