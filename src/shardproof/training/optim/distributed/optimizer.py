"""The public class of the distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardproof.engine.state import ParameterSlots, Receipt, SlotProvider, StoredSlot
from shardproof.training.optim.distributed.bucketing import (
    ParamGroups,
    check_same,
    groups_of,
    make_buckets,
    make_weights,
    model_ranks,
)
from shardproof.training.optim.distributed.flat_bucket import Masters, RankGroup, RankGroups, Weight
from shardproof.training.optim.distributed.gather import Gather
from shardproof.training.optim.distributed.gradients import Gradients, StepAgreement, agree, count_zeros
from shardproof.training.optim.distributed.inner_optimizer import describe, make_stepper, receipt
from shardproof.training.optim.distributed.loss_scale import LossScale
from shardproof.training.optim.schema import Factory


def _no_expert(name: str, parameter: torch.nn.Parameter) -> bool:
    return False


class DistributedOptimizer(torch.optim.Optimizer):
    """Data-parallel training in which each rank steps a part of the parameters (ZeRO-1 and 2).

    It replaces both `DistributedDataParallel` and the optimizer. It moves parameters into flat buckets, and
    each rank owns a range of each bucket. During backward, one reduce-scatter for each bucket averages the
    gradients over the ranks and sets `parameter.grad` to None, so clip with `clip_grad_norm_` of this class.
    Each rank steps its ranges. The next forward gathers the new parameters. A parameter with a gradient on
    any rank is stepped on all ranks. A parameter without a gradient on all ranks is not stepped.

    `backward`, `step`, `clip_grad_norm_`, `count_zero_gradients` and `zero_grad` communicate: every rank
    must call them the same number of times, in the same order. Saves and loads of the state do not
    communicate. A backward pass must reach a parameter on all ranks or on none.

    Args:
        module: the model. The optimizer broadcasts the parameters of the group's first rank.
        optimizer_class: an elementwise torch optimizer, or a callable ``optimizer_class(groups, **options)``,
            for example a `functools.partial` of `HybridDeviceOptimizer`.
        param_groups: groups of the module's parameters as for torch optimizers; or a function that returns a
            parameter's options, ``param_groups(name, parameter) -> {"weight_decay": 0.0}``; or None for one
            group of all parameters. Parameters that are frozen take no memory, and stay frozen. One that is
            frozen later may be unfrozen again.
        process_group: the data-parallel ranks; None for all.
        expert_group: the ranks that share this rank's experts. Expert gradients come from all ranks of
            `process_group`: they are summed over `expert_group` and divided by the size of `process_group`.
        is_expert: ``is_expert(name, parameter)`` returns True for a parameter of `expert_group`.
        model_group: the ranks with other parts of this rank's model (tensor, pipeline parallel), which norms
            include. None uses the mesh of DTensor parameters.
        bucket_bytes: size of a gradient bucket in bytes. A larger parameter has its own bucket.
        gradient_dtype: dtype in which gradients are accumulated and reduced; None for each parameter's dtype.
        master_dtype: dtype of the masters of bf16 and fp16 parameters; None for no masters. fp32 parameters
            have no masters.
        state_dtypes: dtypes in which to store slots, such as ``{"exp_avg": torch.bfloat16}``. A step casts
            these slots to fp32.
        shard_gradients: True to reuse full gradient buffers after the reduction (ZeRO-2), False to keep one
            for each bucket (ZeRO-1).
        overlap_reduce: True to reduce during backward, False to reduce in `step`. Use False if some ranks do
            not use a parameter and the model's backward communicates over the same ranks.
        overlap_gather: True to return from `step` before the parameters are gathered. Then call
            `synchronize()` before reading a parameter other than by its module's forward or state_dict.
        loss_scale: factor on the loss (see `scale`). A step whose gradients are not finite is skipped.
        options: options of the optimizer class: ``lr=1e-3``, ...

    Raises:
        ValueError: parameters differ between ranks, are on the meta device or are not the module's; the
            optimizer is not elementwise; `state_dtypes` names an unknown slot.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = DistributedOptimizer(model, torch.optim.AdamW, lr=1e-2)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> float(optimizer.clip_grad_norm_(1.0))
    2.8284270763397217
    >>> optimizer.step(); optimizer.zero_grad()
    """

    _step_supports_amp_scaling = True
    """Makes `torch.amp.GradScaler` call `step`, which refuses it, instead of failing without a remedy."""

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
            raise ValueError("expert_group and is_expert must be set together")
        groups, frozen = groups_of(module, param_groups)
        ids = set(map(id, frozen))
        self._frozen = [(name, item) for name, item in module.named_parameters() if id(item) in ids]
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
        self._agreement: StepAgreement | None = None
        self.skipped = False
        """True if the last step was skipped because a gradient on a rank was not finite."""
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
        self._masters.record_versions()
        self._gradients.attach_hooks()
        self._gather.attach_hooks(module, self._weights, self._gradients.begin_forward)

    # Training

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters with gradients. With a loss scale, skip the step if these are not finite.

        Args:
            closure: computes the loss and its gradients; called once.

        Raises:
            RuntimeError: a parameter was moved out of its flat buffer, a parameter that was frozen when the
                optimizer was made is not any more, or a `torch.amp.GradScaler` made the call.
        """
        if vars(self).pop("grad_scale", self) is not self:  # the scaler may set it to None
            raise RuntimeError(
                "torch's GradScaler reads gradients that a DistributedOptimizer has already reduced, so it "
                "finds no infinity: pass loss_scale=DynamicLossScale() to the optimizer, call "
                "optimizer.scale(loss).backward(), and optimizer.step() without the scaler"
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when the DistributedOptimizer was made, so the optimizer has no "
                    "memory for it. Make the optimizer first, and then freeze parameters that are to train "
                    "later. In a running program: save, build the model, make a new optimizer, and load"
                )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        agreement = self._reduce_and_agree(norm=False)
        self._agreement = None
        self._gradients.expect(agreement.stepped)
        if self._loss_scale is not None:
            self._loss_scale.update(not agreement.finite)
        self.skipped = not agreement.finite
        if self.skipped:
            return loss
        self._gather.wait_all()
        for weight in self._weights:
            weight.check_in_place()
        self._masters.follow_parameters()
        self._stepper.step(agreement.stepped, self.param_groups)
        changed = {weight.bucket: None for weight in agreement.stepped}
        self._masters.round_to_parameters(changed)
        self._gather.start(changed)
        torch.autograd.graph.increment_version([weight.parameter for weight in agreement.stepped])
        self._masters.record_versions()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. A reduction that has begun is completed first.

        Args:
            set_to_none: ignored; gradients become None.
        """
        self._agreement = None
        self._gradients.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without a reduction, which the next backward pass outside or `step` does."""
        before, self._gradients.synchronized = self._gradients.synchronized, False
        try:
            yield
        finally:
            self._gradients.synchronized = before

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for backward. The reduction divides the gradients by the loss scale.

        >>> optimizer = DistributedOptimizer(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1, loss_scale=4.0)
        >>> float(optimizer.scale(torch.tensor(1.5)))
        6.0
        """
        return loss if self._loss_scale is None else loss * self._loss_scale.value

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the 2-norm of all of them, over all ranks, is at most `max_norm`.

        Returns:
            The norm before scaling, a 0-D fp32 tensor. As in `torch.nn.utils.clip_grad_norm_`, the factor is
            ``max_norm / (norm + 1e-6)`` if that is below 1, and gradients become NaN if the norm is NaN.
        """
        norm = self._reduce_and_agree(norm=True).norm
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:
            for bucket in self._buckets:
                bucket.multiply(factor)
        return torch.tensor(norm, dtype=torch.float32, device=self._buckets[0].device)

    @torch.no_grad()
    def count_zero_gradients(self) -> int:
        """Number of elements with a zero gradient, of all parameters with a gradient, over all ranks."""
        agreement = self._reduce_and_agree(norm=False)
        return count_zeros(agreement.stepped, self._groups, self._buckets[0].device)

    def synchronize(self) -> None:
        """Wait until all parameters are gathered."""
        self._gather.wait_all()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses parameters after construction, because the flat buffers are fixed."""
        if self._complete:
            raise RuntimeError(
                "parameters cannot be added to a DistributedOptimizer: save its state, make a new optimizer "
                "over all parameters, and load the state"
            )
        super().add_param_group(param_group)

    # State (see `shardproof.state.SlotProvider`)

    def describe_slots(self) -> Iterator[ParameterSlots]:
        """See `SlotProvider`. Yields this rank's ranges of every parameter."""
        self.synchronize()
        self._masters.follow_parameters()
        yield from describe(self._weights, self._stepper, self.param_groups)

    def receive_slots(self, parameter: torch.Tensor, stored: Mapping[str, StoredSlot]) -> Receipt:
        """See `SlotProvider`. Loads slots that any number of ranks saved.

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
        """The loss scale, and the shared state of the inner optimizer."""
        shared: dict[str, Any] = {}
        if self._loss_scale is not None:
            shared["loss_scale"] = self._loss_scale.describe()
        inner = self._stepper.inner
        if isinstance(inner, SlotProvider) and (own := inner.describe_shared()):
            shared["inner"] = own
        return shared

    def receive_shared(self, state: Mapping[str, Any]) -> None:
        """Loads the value of `describe_shared`. Ignores a loss scale if this optimizer has none."""
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.receive(state["loss_scale"])
        inner = self._stepper.inner
        if isinstance(inner, SlotProvider) and "inner" in state:
            inner.receive_shared(state["inner"])

    # Internal

    def _reduce_and_agree(self, *, norm: bool) -> StepAgreement:
        """Reduce all gradients, and return the agreement of the ranks."""
        gradients, finite = self._gradients, self._loss_scale is not None
        if self._agreement is not None and not gradients.touched and not norm:
            return self._agreement
        gradients.finish()
        while True:
            late = gradients.late()
            agreement = agree(self._buckets, self._weights, late, self._groups, norm=norm, finite=finite)
            if not agreement.any_late:
                break
            gradients.reduce_late(agreement.late)
        self._agreement = agreement
        return agreement


def _no_state_dict(*_: Any) -> None:
    raise RuntimeError(
        "a DistributedOptimizer has no state_dict: no rank has all of its state, and a gather would be a "
        "collective. Save it with shardproof.save(path, {'model': model, 'optimizer': optimizer})"
    )
