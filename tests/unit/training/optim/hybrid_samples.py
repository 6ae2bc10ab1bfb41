"""A model, gradients, the Lion optimizer and delayed copies, for the tests of the hybrid optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.optim import HybridDeviceOptimizer
from shardproof.training.optim.hybrid import optimizer as hybrid_module


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (Chen et al., 2023, arXiv:2302.06675), written plainly."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].mul(first).add(weight.grad, alpha=1 - first).sign_()
                weight.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(second).add_(weight.grad, alpha=1 - second)


Tensors = Sequence[torch.Tensor]

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1, "fused": True}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.02, "amsgrad": True, "foreach": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "fused": True}),
    "lion": (Lion, {"lr": 0.02, "weight_decay": 0.1}),
}


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Linear(3, 2)).to(dtype)


def hybrid(
    model: nn.Module, kind: str = "adamw", fraction: float = 0.5, **others: Any
) -> HybridDeviceOptimizer:
    make, options = RULES[kind]
    return HybridDeviceOptimizer(model.parameters(), make, cpu_fraction=fraction, **{**options, **others})


def plain(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    make, options = RULES[kind]
    return make(model.parameters(), **options)


def fill_gradients(model: nn.Module, step: int) -> None:
    """Gradients that depend on the step alone, in the parameters' dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        fill_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class LateTransfers:
    """Transfers whose copies run when their event is waited for, or at the end.

    Until then the destination holds NaN, so that code that does not wait reads NaN. A source that is
    overwritten too early gives wrong values. `log` lists the operations in order.
    """

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.began = False
        self.queues: dict[str, list[Callable[[], object]]] = {"down": [], "up": []}

    def event(self) -> Any:
        return _LateEvent(self)

    def begin(self) -> None:
        self.began = True
        self.log.append("begin")

    def down(self, destinations: Tensors, sources: Tensors, event: Any) -> None:
        assert self.began, "a copy that does not wait for the gradient"
        self._enqueue("down", destinations, sources, event)

    def up(self, destinations: Tensors, sources: Tensors, event: Any) -> None:
        assert self.began
        self._enqueue("up", destinations, sources, event)

    def end(self) -> None:
        self.log.append("end")
        self.began = False
        self._run("up", len(self.queues["up"]))

    def _enqueue(self, queue: str, destinations: Tensors, sources: Tensors, event: Any) -> None:
        for destination in destinations:
            destination.fill_(torch.nan)  # changes the version now, as a copy on a stream does
        uncounted, weak = [item.data for item in destinations], [weakref.ref(item) for item in sources]

        def copy() -> None:
            for destination, reference in zip(uncounted, weak, strict=True):
                found = reference()
                assert found is not None, "the source was freed before its copy ran"
                destination.copy_(found)

        self.queues[queue].append(copy)
        event.queue, event.place = queue, len(self.queues[queue])
        self.log.append(queue)

    def _run(self, queue: str, count: int) -> None:
        for copy in self.queues[queue][:count]:
            copy()
        done = self.queues[queue][:count]
        self.queues[queue][:count] = [_nothing] * len(done)


class _LateEvent:
    def __init__(self, transfers: LateTransfers) -> None:
        self.transfers = transfers
        self.queue = ""
        self.place = 0

    def synchronize(self) -> None:
        if self.queue:
            self.transfers.log.append(f"wait {self.queue}")
            self.transfers._run(self.queue, self.place)


def _nothing() -> None:
    return


def late_copies(monkeypatch: Any) -> list[str]:
    """Makes new optimizers use `LateTransfers`; returns their common log."""
    log: list[str] = []
    monkeypatch.setattr(hybrid_module, "transfers_for", lambda device, overlap: LateTransfers(log))
    return log
