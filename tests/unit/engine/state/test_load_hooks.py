"""The hooks of load_state_dict run in a load as in torch: each row of the table in docs/concepts.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardproof as sp

Log = list[tuple[Any, ...]]


class Inverse(nn.Module):
    """Has a buffer that is derived from its weight, and refreshed after each load."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), value))
        self.register_buffer("inv", 1 / self.w.detach(), persistent=False)
        self.register_load_state_dict_post_hook(self._refresh)

    @staticmethod
    def _refresh(module: nn.Module, keys: Any) -> None:
        module.inv = 1 / module.w.detach()


class Logged(nn.Module):
    """Logs each of its load hooks."""

    def __init__(self, log: Log, name: str, child: nn.Module | None = None) -> None:
        super().__init__()
        self.log, self.name = log, name
        self.w = nn.Parameter(torch.zeros(2))
        if child is not None:
            self.child = child
        self.register_load_state_dict_pre_hook(self._before)
        self.register_load_state_dict_post_hook(self._after)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.log.append((self.name, "override", prefix, sorted(state)))
        super()._load_from_state_dict(state, prefix, *rest)

    @staticmethod
    def _before(
        module: Any, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *_: Any
    ) -> None:
        values = {name: item.tolist() for name, item in state.items()}
        module.log.append((module.name, "pre", prefix, values, dict(metadata), strict, list(missing)))

    @staticmethod
    def _after(module: Any, keys: Any) -> None:
        module.log.append((module.name, "post", sorted(keys.missing_keys), sorted(keys.unexpected_keys)))


class Renamed(nn.Module):
    """Reads the name that its weight had before, and drops an obsolete value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}gamma" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}gamma")
        state.pop(f"{prefix}obsolete", None)


def test_post_hook_refreshes_a_derived_buffer(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"model": nn.Sequential(nn.Linear(2, 2), Inverse(4.0))})
    target = nn.Sequential(nn.Linear(2, 2), Inverse(1.0))
    sp.load(tmp_path / "c", {"model": target})
    assert target[1].inv.tolist() == [0.25] * 4


def test_post_hook_runs_in_a_restore(tmp_path: Path) -> None:
    run = sp.Checkpointer(tmp_path / "run")
    run.save(1, {"model": Inverse(4.0)}).result()
    target = Inverse(1.0)
    assert run.restore({"model": target}) == 1
    assert target.inv.tolist() == [0.25] * 4


def test_hooks_run_as_in_torch(tmp_path: Path) -> None:
    """The same calls, in the same order, with the same prefixes, metadata and keys as in torch."""

    def build(log: Log) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), Logged(log, "outer", Logged(log, "inner")))

    source = build([])
    sp.save(tmp_path / "c", {"model": source})
    ours: Log = []
    theirs: Log = []
    target, reference = build(ours), build(theirs)
    sp.load(tmp_path / "c", {"model": target})
    reference.load_state_dict(source.state_dict())
    assert ours == theirs
    calls = [("outer", "override"), ("outer", "pre"), ("inner", "override"), ("inner", "pre")]
    assert [entry[:2] for entry in ours] == [*calls, ("inner", "post"), ("outer", "post")]
    assert torch.equal(target[0].weight, source[0].weight)


def test_hooks_get_the_keys_of_one_side(tmp_path: Path) -> None:
    """Without `strict`, a post-hook sees the missing and the unexpected keys, as in torch."""

    def build(log: Log, *, other: bool) -> nn.Module:
        model = nn.Module()
        model.first = nn.Linear(2, 2, bias=not other)
        model.second = nn.Linear(2, 2, bias=other)
        model.register_load_state_dict_post_hook(lambda module, keys: log.append(tuple(map(list, keys))))
        return model

    source = build([], other=False)
    sp.save(tmp_path / "c", {"model": source})
    ours: Log = []
    theirs: Log = []
    sp.load(tmp_path / "c", {"model": build(ours, other=True)}, strict=False)
    build(theirs, other=True).load_state_dict(source.state_dict(), strict=False)
    assert ours == theirs == [(["second.bias"], ["first.bias"])]


def test_overridden_load_state_dict_of_the_outermost_module_runs(tmp_path: Path) -> None:
    class Own(nn.Linear):
        seen: Any = None

        def load_state_dict(self, state: Any, strict: bool = True) -> Any:
            self.seen = {name: value.clone() for name, value in state.items()}
            return super().load_state_dict(state, strict)

    source, target = Own(2, 2), Own(2, 2)
    sp.save(tmp_path / "c", {"model": source})
    sp.load(tmp_path / "c", {"model": target})
    assert target.seen is not None
    assert all(torch.equal(value, target.seen[name]) for name, value in source.state_dict().items())


def test_overridden_load_state_dict_of_an_inner_module_does_not_run(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def load_state_dict(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("torch does not call it")

    source, target = nn.Sequential(Own(2, 2), Inverse(4.0)), nn.Sequential(Own(2, 2), Inverse(1.0))
    sp.save(tmp_path / "c", {"model": source})
    sp.load(tmp_path / "c", {"model": target})
    assert torch.equal(target[0].weight, source[0].weight) and target[1].inv.tolist() == [0.25] * 4


def test_methods_that_the_program_sets_on_an_object_run(tmp_path: Path) -> None:
    log: Log = []

    def logged(method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            log.append((method.__name__,))
            return method(*args, **options)

        return call

    def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def changed(value: Any, method: str) -> None:
        setattr(value, method, logged(getattr(value, method)))

    source, target = build(), build()
    changed(source[0], "state_dict")
    sp.save(tmp_path / "c", source)
    assert log == [("state_dict",)]
    for value, method in [
        (target[0], "load_state_dict"),
        (target[0][0], "_load_from_state_dict"),
        (target[1], "load_state_dict"),
    ]:
        changed(value, method)
    log.clear()
    sp.load(tmp_path / "c", target)
    assert log == [("load_state_dict",), ("_load_from_state_dict",), ("load_state_dict",)]
    changed(source[1], "state_dict")
    with pytest.raises(sp.StructureError, match="SGD overrides state_dict"):
        sp.save(tmp_path / "d", source)


def test_hooks_of_a_module_that_describes_its_shards_are_refused(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.ones(4))
            self.loaded = 0

        def state_dict(self, *_: Any, **__: Any) -> Any:
            return {"w": sp.FlatShard(self.flat.detach(), (2, 2), 0, 4)}

        def state_loaded(self) -> None:
            self.loaded += 1

    model = Flat()
    sp.save(tmp_path / "c", {"model": model})
    handle = model.register_load_state_dict_post_hook(lambda module, keys: None)
    with pytest.raises(sp.StructureError, match=r"Flat has hooks.*Define state_loaded\(\)"):
        sp.load(tmp_path / "c", {"model": model})
    handle.remove()
    sp.load(tmp_path / "c", {"model": model})
    assert model.loaded == 1


def test_hooks_do_not_run_if_nothing_of_the_module_is_selected(tmp_path: Path) -> None:
    state = {"model": Inverse(4.0), "other": torch.ones(1)}
    sp.save(tmp_path / "c", state)
    log: Log = []
    target = {"model": Logged(log, "model"), "other": torch.zeros(1)}
    sp.load(tmp_path / "c", target, include="other")
    assert log == []


def test_pre_hook_renames_stored_keys(tmp_path: Path) -> None:
    stored = {"model": {"block": {"gamma": torch.arange(3.0), "obsolete": torch.ones(5)}}}
    sp.save(tmp_path / "c", stored)
    target = nn.ModuleDict({"block": Renamed()})
    sp.load(tmp_path / "c", {"model": target})
    assert target["block"].weight.tolist() == [0.0, 1.0, 2.0]
    torch.save(stored, tmp_path / "old.pt")
    target = nn.ModuleDict({"block": Renamed()})
    sp.load(tmp_path / "old.pt", {"model": target})
    assert target["block"].weight.tolist() == [0.0, 1.0, 2.0]


def test_keys_that_hooks_do_not_adapt_are_an_error(tmp_path: Path) -> None:
    sp.save(tmp_path / "c", {"model": {"delta": torch.ones(3)}})
    target = Renamed()
    with pytest.raises(sp.KeyMismatchError, match=r"missing \(1\): weight(.|\n)*unexpected \(1\): delta"):
        sp.load(tmp_path / "c", {"model": target})
    report = sp.load(tmp_path / "c", {"model": target}, strict=False)
    assert (report.missing, report.unexpected) == (("model.weight",), ("model.delta",))


def test_observers_take_the_stored_shape(tmp_path: Path) -> None:
    """The statistics of a quantization-aware model have the shape [0] until it runs."""
    from torch.ao import quantization

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        return quantization.prepare_qat(model.train())

    source, target = build(), build()
    for _ in range(3):
        source(torch.randn(7, 3))
    sp.save(tmp_path / "c", {"model": source})
    sp.load(tmp_path / "c", {"model": target})
    expected = source.state_dict()
    assert any(value.shape == (5,) and "min_val" in name for name, value in expected.items())
    for name, value in target.state_dict().items():
        assert torch.equal(value, expected[name]), name
    inputs = torch.randn(2, 3)
    assert torch.equal(source.eval()(inputs), target.eval()(inputs))


def test_lazy_modules_take_the_stored_shape(tmp_path: Path) -> None:
    source = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(sp.StructureError, match=r"model\.0\.weight is not initialized"):
        sp.save(tmp_path / "c", {"model": source})
    source(torch.randn(4, 2))
    sp.save(tmp_path / "c", {"model": source})
    target = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    sp.load(tmp_path / "c", {"model": target})
    inputs = torch.randn(4, 2)
    assert torch.equal(source.eval()(inputs), target.eval()(inputs))
    with pytest.raises(sp.StructureError, match=r"other\.weight is not initialized"):
        sp.load(tmp_path / "c", {"other": nn.LazyLinear(3)})


def test_weight_norm_reads_its_earlier_names(tmp_path: Path) -> None:
    from torch.nn.utils import parametrizations

    earlier = nn.utils.weight_norm(nn.Linear(3, 2))
    torch.save({"model": earlier.state_dict()}, tmp_path / "old.pt")
    target = parametrizations.weight_norm(nn.Linear(3, 2))
    sp.load(tmp_path / "old.pt", {"model": target})
    inputs = torch.randn(4, 3)
    assert torch.allclose(earlier(inputs), target(inputs))


def test_spectral_norm_and_attention_still_load(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.ModuleList(
            [
                nn.utils.spectral_norm(nn.Linear(3, 2)),
                nn.MultiheadAttention(4, 2),
                nn.BatchNorm1d(3),
                nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
            ]
        )

    source, target = build(), build()
    sp.save(tmp_path / "c", {"model": source})
    sp.load(tmp_path / "c", {"model": target})
    expected = source.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in target.state_dict().items())


def test_tied_weights_and_extra_state(tmp_path: Path) -> None:
    class Extra(Inverse):
        extra = 0

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, state: int) -> None:
            self.extra = state

    def build(value: float, extra: int) -> nn.Module:
        model = nn.ModuleList([Extra(value), Extra(value)])
        model[1].w = model[0].w
        model[1].extra = extra
        return model

    sp.save(tmp_path / "c", {"model": build(4.0, 7)})
    target = build(1.0, 0)
    sp.load(tmp_path / "c", {"model": target})
    assert target[1].extra == 7 and target[0].extra == 0
    assert target[0].inv.tolist() == target[1].inv.tolist() == [0.25] * 4
    assert target[0].w is target[1].w


def test_checkpointed_and_compiled_modules_inside(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    sp.save(tmp_path / "c", {"model": nn.Sequential(Inverse(4.0), Inverse(4.0), Renamed())})
    target = nn.Sequential(
        checkpoint_wrapper(Inverse(1.0)), torch.compile(Inverse(1.0)), checkpoint_wrapper(Renamed())
    )
    sp.load(tmp_path / "c", {"model": target})
    assert target[0]._checkpoint_wrapped_module.inv.tolist() == [0.25] * 4
    assert target[1]._orig_mod.inv.tolist() == [0.25] * 4


def test_hooks_of_an_outermost_wrapper_are_refused(tmp_path: Path) -> None:
    model = Inverse(4.0)
    wrapped = torch.compile(model)
    load = wrapped.register_load_state_dict_post_hook(lambda module, keys: None)
    sp.save(tmp_path / "c", {"model": wrapped})
    with pytest.raises(sp.StructureError, match="OptimizedModule has hooks of load_state_dict"):
        sp.load(tmp_path / "c", {"model": wrapped})
    load.remove()
    save = wrapped.register_state_dict_post_hook(lambda *_: None)
    with pytest.raises(sp.StructureError, match="OptimizedModule has hooks of state_dict"):
        sp.save(tmp_path / "d", {"model": wrapped})
    save.remove()
    log: Log = []
    model.register_load_state_dict_post_hook(lambda module, keys: log.append(("inside",)))
    sp.load(tmp_path / "c", {"model": wrapped})
    assert log == [("inside",)]


def test_state_dict_hooks_run_in_a_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    log: Log = []
    model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: log.append(("pre", prefix)))
    model.register_state_dict_post_hook(lambda *_: log.append(("post",)))
    sp.save(tmp_path / "c", {"model": model})
    assert log == [("pre", ""), ("post",)]


def test_failing_hook_names_its_module(tmp_path: Path) -> None:
    def fail(module: nn.Module, keys: Any) -> None:
        raise KeyError("table")

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sp.save(tmp_path / "c", {"model": model})
    model[1].register_load_state_dict_post_hook(fail)
    with pytest.raises(sp.ShardproofError, match=r"state\['model'\], module '1': a load hook of Linear"):
        sp.load(tmp_path / "c", {"model": model})


def test_a_load_with_hooks_copies_no_tensor(tmp_path: Path) -> None:
    """Only modules with hooks copy, and those copy a tensor to itself, which torch skips."""
    model = nn.Sequential(nn.Linear(2, 2), Inverse(4.0))
    sp.save(tmp_path / "c", {"model": model})
    copied: list[str] = []

    class Copies(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") == "copy_" and args[0] is not args[1]:
                copied.append(str(args[0].shape))
            return function(*args, **(kwargs or {}))

    with Copies():
        sp.load(tmp_path / "c", {"model": model})
    assert copied == []


def _stepped(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_optimizer_hooks_run(tmp_path: Path) -> None:
    model, optimizer = _stepped(lr=0.5)
    sp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, target = _stepped(lr=0.1)
    log: Log = []

    def before(optimizer: Any, state: Any) -> Any:
        log.append(("pre", state["param_groups"][0]["lr"], sorted(state["state"])))
        return {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}

    target.register_load_state_dict_pre_hook(before)
    target.register_load_state_dict_post_hook(lambda one: log.append(("post", one.param_groups[0]["lr"])))
    slots = target.state[other.weight]["exp_avg"]
    sp.load(tmp_path / "c", {"model": other, "optimizer": target})
    assert log == [("pre", 0.5, [0, 1]), ("post", 0.25)]
    assert target.state[other.weight]["exp_avg"] is slots
    assert torch.equal(slots, optimizer.state[model.weight]["exp_avg"])


def test_overridden_load_state_dict_of_an_optimizer_runs(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        seen: Any = None

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            self.seen = self.param_groups[0]["lr"]

    model = nn.Linear(2, 2)
    sp.save(tmp_path / "c", {"model": model, "optimizer": Own(model.parameters(), lr=0.5)})
    target = Own(model.parameters(), lr=0.1)
    sp.load(tmp_path / "c", {"model": model, "optimizer": target})
    assert target.seen == 0.5
    declared = Own(model.parameters(), lr=0.1)
    sp.load(tmp_path / "c", {"model": model, "optimizer": sp.OptimizerState(declared, model)})
    assert declared.seen is None and declared.param_groups[0]["lr"] == 0.5


def test_slots_keep_their_dtype_beside_a_pre_hook(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = _stepped()
        model.to(torch.bfloat16)
        return model, optimizer

    model, optimizer = build()
    sp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other, target = build()
    target.register_load_state_dict_pre_hook(lambda optimizer, state: None)
    sp.load(tmp_path / "c", {"model": other, "optimizer": target})
    loaded = target.state[other.weight]["exp_avg"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, optimizer.state[model.weight]["exp_avg"])


def test_state_dict_hooks_of_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = _stepped()
    log: Log = []
    optimizer.register_state_dict_pre_hook(lambda optimizer: log.append(("pre",)))
    sp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert log == [("pre",)]
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "extra": 1})
    with pytest.raises(sp.StructureError, match="post-hook of state_dict"):
        sp.save(tmp_path / "d", {"model": model, "optimizer": optimizer})
    sp.save(tmp_path / "d", {"model": model, "optimizer": sp.OptimizerState(optimizer, model)})


@pytest.mark.parametrize("package", ["megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp"])
def test_the_state_dict_hook_of_megatron_fsdp_has_its_own_advice(package: str, tmp_path: Path) -> None:
    """A function stands in for the hook of the package, and of its copy in Megatron-Core."""
    model, optimizer = _stepped()

    def hook(optimizer: Any, state: Any) -> None:
        pass

    hook.__module__ = f"{package}.fully_shard"
    optimizer.register_state_dict_post_hook(hook)
    with pytest.raises(sp.StructureError, match="megatron_fsdp.optimizer_state\\(optimizer, model\\)"):
        sp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})


def test_failing_optimizer_hook_names_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = _stepped()
    sp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    def fail(optimizer: Any) -> None:
        raise KeyError("table")

    optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(sp.ShardproofError, match=r"state\['optimizer'\]: load_state_dict of AdamW"):
        sp.load(tmp_path / "c", {"model": model, "optimizer": optimizer})


def test_pre_hook_of_an_optimizer_without_a_local_state_dict_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = sp.optim.HybridDeviceOptimizer(model.parameters(), torch.optim.AdamW, cpu_fraction=1.0)
    state = {"model": model, "optimizer": optimizer}
    sp.save(tmp_path / "c", state)
    handle = optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: None)
    with pytest.raises(sp.StructureError, match="HybridDeviceOptimizer has the pre-hook of load_state_dict"):
        sp.load(tmp_path / "c", state)
    handle.remove()
    sp.load(tmp_path / "c", state)
    optimizer.load_state_dict = lambda state: None
    with pytest.raises(sp.StructureError, match="HybridDeviceOptimizer has an own load_state_dict"):
        sp.load(tmp_path / "c", state)


def test_methods_below_a_class_that_describes_its_slots_are_refused(tmp_path: Path) -> None:
    class Own(sp.optim.HybridDeviceOptimizer):
        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("a load has no state dict for it")

    class More(sp.optim.HybridDeviceOptimizer):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": 1}

    model = nn.Linear(2, 2)
    own, more = (kind(model.parameters(), torch.optim.AdamW) for kind in (Own, More))
    sp.save(tmp_path / "c", {"model": model, "optimizer": own})
    with pytest.raises(sp.StructureError, match="Own has an own load_state_dict"):
        sp.load(tmp_path / "c", {"model": model, "optimizer": own})
    with pytest.raises(sp.StructureError, match="More overrides state_dict"):
        sp.save(tmp_path / "d", {"model": model, "optimizer": more})
