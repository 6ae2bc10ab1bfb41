"""The distributed optimizer: what the program calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardproof.optim.distributed.bucketing import (
    ParamGroups,
    check_same,
    groups_of,
    make_buckets,
    make_weights,
    model_ranks,
)
from shardproof.optim.distributed.flat_bucket import Weight
from shardproof.optim.distributed.gather import Gather
from shardproof.optim.distributed.gradients import Gradients
from shardproof.optim.distributed.inner_optimizer import make_stepper
from shardproof.optim.distributed.loss_scale import LossScale
from shardproof.optim.distributed.masters import Masters
from shardproof.optim.distributed.process_group import RankGroup
from shardproof.optim.distributed.slot_ranges import describe, receipt
from shardproof.optim.distributed.step_agreement import RankGroups, StepAgreement, agree, count_zeros
from shardproof.optim.schema import Factory
from shardproof.state import ParameterSlots, Receipt, SlotKeeper, StoredSlot

__all__ = ["DistributedOptimizer"]


def _no_expert(name: str, parameter: torch.nn.Parameter) -> bool:
    return False


class DistributedOptimizer(torch.optim.Optimizer):
    """Data-parallel training in which each rank steps its own part of the parameters (ZeRO-1 and 2).

    It takes the place of both `DistributedDataParallel` and the optimizer. Parameters are moved into flat
    buckets; each rank owns a range of each bucket, wherever parameters begin. Gradients are taken from
    `parameter.grad` (which is None afterwards: clip with `clip_grad_norm_` of this class), averaged over
    ranks by one reduce-scatter for each bucket during backward; each rank steps what it owns; the new
    parameters are gathered during the next forward. A parameter that has a gradient on any rank is stepped
    on all, one that has none anywhere is left alone.

    `backward`, `step`, `clip_grad_norm_`, `count_zero_gradients` and `zero_grad` communicate: every rank
    calls them the same number of times, in the same order. Describing and taking state does not. A backward
    pass reaches a parameter of the optimizer on every rank or on none.

    Args:
        module: its parameters are the same on all ranks afterwards: those of the group's first rank.
        optimizer_class: any optimizer of torch's that steps every element by itself, or a callable like one:
            ``optimizer_class(groups, **options)``, for example a `functools.partial` of
            `HybridDeviceOptimizer`.
        param_groups: groups of the module's parameters as torch takes them; or options by parameter,
            ``param_groups(name, parameter) -> {"weight_decay": 0.0}``; or None for one group of all that
            require gradients.
        process_group: the data-parallel ranks; None for all.
        expert_group: the ranks that share this rank's experts. Expert gradients are summed over it, and
            divided by the size of `process_group`, from all of whose ranks they come.
        is_expert: ``is_expert(name, parameter)`` says which parameters belong to `expert_group`.
        model_group: the ranks that hold other parts of this rank's model (tensor, pipeline parallel), over
            which norms are taken too. Not needed where a mesh of DTensor parameters says it.
        bucket_bytes: size of a gradient bucket in bytes; a larger parameter has one of its own.
        gradient_dtype: in which gradients are added up and reduced; None for each parameter's.
        master_dtype: of the masters of bf16 and fp16 parameters; None for no masters. fp32 parameters have
            none.
        state_dtypes: dtypes by slot, such as ``{"exp_avg": torch.bfloat16}``: kept so, raised to fp32 for
            the step.
        shard_gradients: full gradient buffers are reused once reduced (ZeRO-2), instead of kept (ZeRO-1).
        overlap_reduce: reduce during backward, not in `step`. Where parameters are used on some ranks only,
            and the model's own backward communicates over the same ranks, say False.
        overlap_gather: `step` returns before the parameters are gathered. A parameter that the program reads
            other than by its module's forward or state_dict needs `synchronize()` before.
        loss_scale: multiplies the loss (see `scale`); a step whose gradients are not finite is left out.
        options: of the optimizer class: ``lr=1e-3``, ...

    Raises:
        ValueError: parameters are not the same on all ranks, are on the meta device or not the module's; the
            optimizer is not elementwise; `state_dtypes` names no slot of it.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = DistributedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> float(optimizer.clip_grad_norm_(1.0))
    2.8284270763397217
    >>> optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        param_groups: ParamGroups = None,
        process_group: dist.ProcessGroup | None = None,
        expert_group: dist.ProcessGroup | None = None,
        is_expert: Callable[[str, torch.nn.Parameter], bool] | None = None,
        model_group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 32 << 20,
        gradient_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        state_dtypes: Mapping[str, torch.dtype] | None = None,
        shard_gradients: bool = True,
        overlap_reduce: bool = True,
        overlap_gather: bool = True,
        loss_scale: float | LossScale | None = None,
        **options: Any,
    ) -> None:
        if (expert_group is None) != (is_expert is None):
            raise ValueError("give expert_group and is_expert together, or neither")
        groups = groups_of(module, param_groups)
        self._complete = False
        self._weights = make_weights(module, groups)
        self._by_parameter: dict[torch.Tensor, Weight] = {
            weight.parameter: weight for weight in self._weights
        }
        self._loss_scale = LossScale(loss_scale) if isinstance(loss_scale, (int, float)) else loss_scale
        data = RankGroup(process_group)
        self._groups = RankGroups(
            data,
            data if expert_group is None else RankGroup(expert_group),
            model_ranks(self._weights, model_group),
        )
        check_same(self._weights, self._groups, is_expert or _no_expert)
        self._buckets = make_buckets(
            self._weights, self._groups, is_expert or _no_expert, gradient_dtype, bucket_bytes
        )
        for bucket in self._buckets:
            bucket.ranks.broadcast(bucket.parameters)
        self._masters = Masters(self._buckets, master_dtype)
        self._gradients = Gradients(
            self._buckets,
            data.size,
            self._loss_scale or LossScale(1.0),
            reuse=shard_gradients,
            overlap=overlap_reduce,
        )
        self._gather = Gather(self._buckets, overlap=overlap_gather)
        self._verdict: StepAgreement | None = None
        self.skipped = False
        """The last step was left out: a gradient on some rank was not finite."""
        self._stepper, self._schemas = make_stepper(
            Factory(optimizer_class, options), self._weights, groups, master_dtype, state_dtypes or {}
        )
        inner = self._stepper.inner
        super().__init__(groups, dict(inner.defaults))
        for mine, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            for name, value in theirs.items():
                mine.setdefault(name, value)
        self._complete = True
        self.register_state_dict_pre_hook(_no_state_dict)
        self.register_load_state_dict_pre_hook(_no_state_dict)
        self._masters.note_versions()
        self._gradients.attach_hooks(module)
        self._gather.attach_hooks(module, self._weights)

    # Training

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have gradients, unless these are not finite and there is a loss scale.

        Args:
            closure: computes the loss and its gradients; called once.

        Raises:
            RuntimeError: a parameter was moved out of its flat buffer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        verdict = self._settle(norm=False)
        self._verdict = None
        self._gradients.expect(verdict.stepped)
        if self._loss_scale is not None:
            self._loss_scale.update(not verdict.finite)
        self.skipped = not verdict.finite
        if self.skipped:
            return loss
        self._gather.wait_all()
        for weight in self._weights:
            weight.check_in_place()
        self._masters.follow_parameters()
        self._stepper.step(verdict.stepped, self.param_groups)
        changed = {weight.bucket: None for weight in verdict.stepped}
        self._masters.round_to_parameters(changed)
        self._gather.start(changed)
        torch.autograd.graph.increment_version([weight.parameter for weight in verdict.stepped])
        self._masters.note_versions()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Where a backward pass has begun to reduce them, the reduction is ended first.

        Args:
            set_to_none: taken for torch's sake; gradients become None.
        """
        self._verdict = None
        self._gradients.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within only add gradients up; the next one outside, or `step`, reduces them."""
        before, self._gradients.synchronized = self._gradients.synchronized, False
        try:
            yield
        finally:
            self._gradients.synchronized = before

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on. Gradients are divided by the loss scale again when they are reduced.

        >>> optimizer = DistributedOptimizer(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1, loss_scale=4.0)
        >>> float(optimizer.scale(torch.tensor(1.5)))
        6.0
        """
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the 2-norm of all of them, over all ranks, is at most `max_norm`.

        Returns:
            The norm before, fp32, 0-dim. As in `torch.nn.utils.clip_grad_norm_`, gradients are scaled by
            ``max_norm / (norm + 1e-6)`` where that is below 1, and become nan where the norm is.
        """
        norm = self._settle(norm=True).norm
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:
            for bucket in self._buckets:
                bucket.multiply(factor)
        return torch.tensor(norm, dtype=torch.float32, device=self._buckets[0].device)

    @torch.no_grad()
    def count_zero_gradients(self) -> int:
        """Elements whose gradient is exactly zero, of all parameters with a gradient, over all ranks."""
        verdict = self._settle(norm=False)
        return count_zeros(verdict.stepped, self._groups, self._buckets[0].device)

    def synchronize(self) -> None:
        """Wait until the parameters are those of the last step, wherever they are read from."""
        self._gather.wait_all()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: where parameters lie in flat buffers is fixed then."""
        if self._complete:
            raise RuntimeError(
                "parameters cannot be added to a DistributedOptimizer: save its state, make it again over "
                "all parameters, and load the state"
            )
        super().add_param_group(param_group)

    # State (see `shardproof.state.SlotKeeper`)

    def describe_slots(self) -> Iterator[ParameterSlots]:
        """What this rank keeps of every parameter."""
        self.synchronize()
        self._masters.follow_parameters()
        yield from describe(self._weights, self._stepper, self.param_groups)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """How a parameter takes what is stored, from any number of ranks.

        Raises:
            KeyError: the parameter is not in `param_groups`.
        """
        self.synchronize()
        weight = self._by_parameter.get(parameter)
        if weight is None:
            raise KeyError(
                f"a parameter of shape {list(parameter.shape)} is in none of the optimizer's groups"
            )
        return receipt(weight, self._stepper, self._schemas[weight.group, weight.stepped_dtype], stored)

    def describe_shared(self) -> dict[str, Any]:
        """The loss scale, and what the inner optimizer says."""
        shared: dict[str, Any] = {}
        if self._loss_scale is not None:
            shared["loss_scale"] = self._loss_scale.describe()
        inner = self._stepper.inner
        if isinstance(inner, SlotKeeper) and (own := inner.describe_shared()):
            shared["inner"] = own
        return shared

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Takes what `describe_shared` gave; a loss scale only where there is one."""
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.receive(state["loss_scale"])
        inner = self._stepper.inner
        if isinstance(inner, SlotKeeper) and "inner" in state:
            inner.receive_shared(state["inner"])

    # Within

    def _settle(self, *, norm: bool) -> StepAgreement:
        """All gradients reduced, and what the ranks have agreed on since."""
        gradients, finite = self._gradients, self._loss_scale is not None
        if self._verdict is not None and not gradients.touched and not norm:
            return self._verdict
        gradients.finish()
        while True:
            late = gradients.late()
            verdict = agree(self._buckets, self._weights, late, self._groups, norm=norm, finite=finite)
            if not verdict.any_late:
                break
            gradients.reduce_late(verdict.late)
        self._verdict = verdict
        return verdict


def _no_state_dict(*_: Any) -> None:
    raise RuntimeError(
        "a DistributedOptimizer has no state_dict: no rank holds all of its state, and gathering it would "
        "take a collective. Save it with shardproof.save(path, {'model': model, 'optimizer': optimizer})"
    )
