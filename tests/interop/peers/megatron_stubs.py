"""More stand-ins for Megatron-Core on the CPU: for training, beside those of `cpu_stubs` for checkpoints.

`install()` goes before the first import of `megatron`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import cpu_stubs
import torch

__all__ = ["FusedAdam", "choose_adam", "install"]


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Apex has it: the count of steps is an option of the group, and the moments are made in a
    step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            correction = (1 - second ** group["step"]) ** 0.5 / (1 - first ** group["step"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = state["exp_avg_sq"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] * correction)


def install(*, fused: bool = True) -> None:
    """Puts the stand-ins in place.

    Args:
        fused: True to stand in for Apex's Adam. Megatron-Core 0.19.2 cannot save or load the state of a torch
            AdamW that has taken no step.
    """
    cpu_stubs.install()
    if torch.cuda.is_available():
        return
    kind = torch.Tensor.type

    def on_device(tensor: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is not None:
            return kind(tensor, dtype, *args, **options)
        return kind(tensor).replace("torch.", "torch.cuda.")

    torch.Tensor.type = on_device
    torch.cuda.get_rng_state = lambda *device: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *device: torch.set_rng_state(state)
    torch.cuda.memory_allocated = lambda *device: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _moved
    if fused:
        choose_adam(fused=True)


def choose_adam(*, fused: bool) -> None:
    """Makes Megatron-Core's next optimizers ones with the stand-in for Apex's Adam, or with torch's AdamW."""
    optimizers = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizers.Adam = distributed.Adam = FusedAdam if fused else torch.optim.AdamW
    optimizers.USING_PYTORCH_OPTIMIZER = not fused
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = fused


def _moved(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
    """Megatron-Core turns the counts of tokens into an array only on their way from CUDA."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _on_cpu(make: Any) -> Any:
    """A factory of tensors that makes them in plain CPU memory, also where it is asked for CUDA."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        options.pop("pin_memory", None)  # which needs an accelerator
        return make(*args, **options)

    return made
