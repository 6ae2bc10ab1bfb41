"""Gradients equal those of plain training, for any sequence of forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardproof.fsdp import fully_shard, no_sync
from shardproof.training.fsdp.unit import units_in

pytestmark = pytest.mark.usefixtures("process_group")

X = torch.arange(12.0).view(3, 4) / 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        self.side = (x * self.scale).square().mean()
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def side(self) -> torch.Tensor:
        return self.blocks[0].side + self.blocks[1].side


class Box:
    """An output whose tensor `fully_shard` does not find."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


class Boxed(Model):
    def forward(self, x: torch.Tensor) -> Box:  # type: ignore[override]
        return Box(super().forward(x))


def twice(model: Model) -> None:
    loss = model(X).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model: Model) -> None:
    first, second = model(X).sum(), model(2 * X).square().sum()
    with torch.inference_mode():
        model(X)
    second.backward()
    first.backward()


def an_inner_unit_first(model: Model) -> None:
    inner = model.blocks[0](X.clone().requires_grad_())
    (inner.square().sum() + model(X).sum()).backward()


def frozen_before_backward(model: Model) -> None:
    loss = model(X).sum()
    model.blocks[0].scale.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    loss.backward()


def moved_before_the_step(model: Model) -> None:
    model(X).sum().backward()
    model.to("cpu")


def assigned_before_inference(model: Model) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.inference_mode():
        model(X)
    model(X).square().sum().backward()


def gradient_of_the_input(model: Model) -> None:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    model(x + gradient).sum().backward()


def sharded(model: Model, strategy: str) -> Model:
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh, strategy=strategy)  # type: ignore[arg-type]
    return model


def made(kind: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    return kind()


def check(model: Model, reference: Model) -> None:
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert torch.allclose(one.grad.to_local(), other.grad, atol=1e-6), name


@pytest.mark.parametrize("strategy", ["all", "optimizer_gradients"])
@pytest.mark.parametrize(
    "passes",
    [
        twice,
        two_forwards,
        an_inner_unit_first,
        frozen_before_backward,
        moved_before_the_step,
        assigned_before_inference,
        gradient_of_the_input,
    ],
)
def test_gradients_are_those_of_plain_training(passes: Callable[[Model], None], strategy: str) -> None:
    model, reference = sharded(made(), strategy), made()
    passes(model)
    passes(reference)
    check(model, reference)


def test_a_loss_beside_the_output_gives_gradients_or_raises() -> None:
    reference = made()
    for strategy in ("optimizer_gradients", "all"):
        model = sharded(made(), strategy)
        loss, side = model(X).sum(), model.side()
        loss.backward(retain_graph=True)
        if strategy == "all":  # its parameters are freed
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                side.backward()
            continue
        side.backward()
        (reference(X).sum() + reference.side()).backward()
        check(model, reference)
    boxed, reference = made(Boxed), made()
    fully_shard(boxed, mesh=init_device_mesh("cpu", (1,)))
    boxed(X).content.sum().backward()
    reference(X).sum().backward()
    check(boxed, reference)


def test_accumulated_gradients_of_a_parameter_that_is_frozen_later_are_dropped() -> None:
    model, reference = sharded(made(), "all"), made()
    with no_sync(model):
        model(X).square().sum().backward()
    model.blocks[0].requires_grad_(False)
    model(X).sum().backward()
    model.zero_grad()
    model.blocks[0].requires_grad_(True)
    model(X).sum().backward()
    reference(X).sum().backward()
    check(model, reference)


def test_a_state_dict_after_a_failed_pass_has_the_sharded_parameters() -> None:
    model = sharded(made(), "all")
    before = dict(model.named_parameters())
    for failing in (model.blocks[0].inner, model.blocks[1].inner):
        for register in (failing.register_forward_hook, failing.register_full_backward_hook):
            handle = register(interrupted)
            with suppress(KeyboardInterrupt):
                model(X).sum().backward()
                raise AssertionError("it was to be interrupted")
            handle.remove()
            now = model.state_dict(keep_vars=True)
            assert all(now[name] is parameter for name, parameter in before.items())
    model(X).sum().backward()
    reference = made()
    reference(X).sum().backward()
    check(model, reference)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_forwards_without_backward_do_not_grow_the_schedule() -> None:
    model = sharded(made(), "all")
    for _ in range(40):
        model(X)
    schedule = units_in(model)[0].__dict__["_shardproof_schedule"]
    assert len(schedule._finished) < 20
