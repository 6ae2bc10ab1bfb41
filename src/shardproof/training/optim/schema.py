"""Finds the slots that an optimizer has for a parameter, by stepping a temporary tensor.

A rank that owns no element of a parameter has no state that shows the slots. It computes the schema from the
optimizer class and options, which are the same on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardproof.engine.state import LocalRange, RandomState, SlotProvider

_IMPLEMENTATION_OPTIONS = ("fused", "foreach", "capturable", "differentiable", "params", "param_names")
"""Options that select an implementation. They do not change the slots, and some require a device."""

_RATE = 0.5
"""Learning rate of the trial steps. The program's own may be zero, which hides all updates."""

_WEIGHT = (1.0, -0.25, 30.0, 0.004)
_GRADIENTS = ((0.5, -20.0, 0.003, 1.0), (-0.25, 8.0, 2.0, 0.125))
"""Values of different magnitude, so that a norm over several elements changes each update."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Kind and dtype of a slot."""

    kind: Literal["elements", "scalar", "value"]
    """A tensor with one number per parameter element, a 0-D tensor, or a plain value."""
    dtype: torch.dtype | None
    """Dtype in which the optimizer creates a tensor slot; None for a plain value."""


@dataclass(frozen=True, slots=True)
class Factory:
    """An optimizer class, or a callable like one, with its options.

    Args:
        make: ``make(params, **options)`` returns the optimizer: a class, or a `functools.partial` of one, for
            example ``partial(HybridDeviceOptimizer, optimizer_class=torch.optim.AdamW)``.
        options: keyword arguments.

    >>> Factory(torch.optim.SGD, {"lr": 0.5})([torch.zeros(2)]).param_groups[0]["lr"]
    0.5
    """

    make: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any]

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        """Makes the optimizer for tensors or parameter groups."""
        return self.make(params, **self.options)

    def accepting(self, options: Mapping[str, Any]) -> Factory:
        """A copy that adds the options that `make` accepts as keyword arguments."""
        parameters = inspect.signature(self.make).parameters.values()
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        return Factory(
            self.make, {**self.options, **{name: item for name, item in options.items() if name in named}}
        )

    def trial(self) -> torch.optim.Optimizer:
        """The optimizer for a temporary 1x1 matrix, before any step."""
        with _on_the_side():
            return self([torch.zeros(1, 1, dtype=torch.float32, device="cpu")])

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of a parameter group.

        >>> Factory(torch.optim.AdamW, {"lr": 0.5}).defaults["betas"]
        (0.9, 0.999)
        """
        return dict(self.trial().defaults)

    @property
    def kind(self) -> str:
        """Class name of the update rule, as in `ParameterSlots.kind`.

        >>> Factory(torch.optim.AdamW, {}).kind
        'AdamW'
        """
        return _kind_and_slots(self.trial())[0]

    def schema(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Spec]:
        """The `slot_schema` of the optimizer that this makes."""
        return slot_schema(self.make, self.options, dtype, device)


def slot_schema(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Spec]:
    """The slots that an elementwise optimizer has for a parameter after a step.

    The function steps a temporary tensor twice, so it finds slots that only the second step creates. It
    restores the state of the random generators.

    Args:
        optimizer_class: the class, or a callable like it (see `Factory`).
        options: keyword arguments, or a whole parameter group. Options that select an implementation
            (``fused``, ``capturable``, ...) are ignored.
        dtype: dtype of the parameter.
        device: device of the temporary tensor, for a class that steps only on an accelerator.

    Returns:
        The specification of each slot, by name.

    Raises:
        ValueError: the optimizer is not elementwise. Either an element's update depends on other elements
            (Adafactor, LAMB, Muon), or a step needs more than a gradient (L-BFGS).

    >>> slot_schema(torch.optim.AdamW, {"lr": 1e-3}, torch.bfloat16)["exp_avg"]
    Spec(kind='elements', dtype=torch.bfloat16)
    >>> slot_schema(torch.optim.SGD, {"lr": 1e-3}, torch.float32)
    {}
    >>> slot_schema(torch.optim.Adafactor, {}, torch.float32)
    Traceback (most recent call last):
    ...
    ValueError: Adafactor is not elementwise: ...
    """
    name = getattr(optimizer_class, "__qualname__", None) or repr(optimizer_class)
    chosen: dict[str, Any] = {}
    for key, value in options.items():
        if key not in _IMPLEMENTATION_OPTIONS:  # copies, because a trial step may change a tensor
            chosen[key] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    chosen["lr"] = _RATE
    factory = Factory(optimizer_class, {}).accepting(chosen)
    with _on_the_side():
        try:
            like = torch.empty(0, dtype=dtype, device=device)
            whole, optimizer = _stepped(factory, chosen, _WEIGHT[:2], (2,), like)
            alone = [
                _stepped(factory, chosen, (weight,), (1,), like, at)[0] for at, weight in enumerate(_WEIGHT)
            ]
            matrix, _ = _stepped(factory, chosen, _WEIGHT, (2, 2), like)
        except Exception as error:
            raise ValueError(
                f"{name} is not elementwise: it cannot step a 1-D tensor from its gradient alone "
                f"({type(error).__name__}: {error}). Use an elementwise optimizer, such as AdamW or SGD"
            ) from error
        apart = torch.cat(alone)
        if not (_near(whole, apart[:2]) and _near(matrix, apart)):
            raise ValueError(
                f"{name} is not elementwise: stepping elements together gives {matrix.tolist()}, one by one "
                f"{apart.tolist()}. Use an elementwise optimizer, such as AdamW or SGD"
            )
        return {
            slot: _spec(item, f"{name}: slot {slot!r}")
            for slot, item in _kind_and_slots(optimizer)[1].items()
        }


def check_slots(dtypes: Mapping[str, torch.dtype], schemas: Iterable[Mapping[str, Spec]]) -> None:
    """Checks that each key of `dtypes` names an elementwise slot of a schema."""
    slots = {slot for schema in schemas for slot, spec in schema.items() if spec.kind == "elements"}
    if unknown := dtypes.keys() - slots:
        raise ValueError(f"state_dtypes names {sorted(unknown)}; the optimizer's slots are {sorted(slots)}")


def _stepped(
    factory: Factory,
    options: Mapping[str, Any],
    weights: tuple[float, ...],
    shape: tuple[int, ...],
    like: torch.Tensor,
    at: int = 0,
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A tensor made like `like` after two steps (1-D, fp32, on the CPU), and its optimizer."""
    tensor = like.new_tensor(weights).reshape(shape)
    optimizer = factory([{**options, "params": [tensor]}])
    for gradient in _GRADIENTS:
        tensor.grad = like.new_tensor(gradient[at : at + len(weights)]).reshape(shape)
        optimizer.step()
    return tensor.flatten().float().cpu(), optimizer


def _kind_and_slots(optimizer: torch.optim.Optimizer) -> tuple[str, dict[str, Any]]:
    """Class and slots of an optimizer of one parameter."""
    if isinstance(optimizer, SlotProvider):
        (slots,) = optimizer.describe_slots()
        return slots.kind, {**slots.tensors, **slots.values}
    states = list(optimizer.state.values())
    return type(optimizer).__qualname__, dict(states[0]) if states else {}


def _spec(item: Any, what: str) -> Spec:
    if isinstance(item, LocalRange):
        return Spec("elements", item.buffer.dtype)
    if not isinstance(item, torch.Tensor):
        return Spec("value", None)
    if item.shape not in ((), (2,)):
        raise ValueError(
            f"{what} is not elementwise: its shape is {list(item.shape)} for a parameter of shape [2]"
        )
    return Spec("elements" if item.dim() else "scalar", item.dtype)


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True)


@contextmanager
def _on_the_side() -> Iterator[None]:
    """Makes the CPU the default device, and restores the random generators on exit."""
    state = RandomState()
    before = state.state_dict()
    try:
        with torch.device("cpu"):
            yield
    finally:
        state.load_state_dict(before)
