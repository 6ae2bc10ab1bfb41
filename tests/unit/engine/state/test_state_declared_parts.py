"""Tensors outside of modules that are parts of a model, as `shardproof.layouts` declares on the modules.

`tests/distributed/test_declared_parts.py` has real ranks.
"""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - of a program
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardproof as sp
from shardproof import layouts
from shardproof.engine.state import layout as process
from shardproof.errors import StructureError
from shardproof.state import Catalogue
from shardproof.state import bind as bind_on
from shardproof.state import collect as collect_on

collect = partial(collect_on, world_size=2)
bind = partial(bind_on, world_size=2)


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have declared parts."""
    monkeypatch.setattr(process, "_has_parts", False)


def model() -> torch.nn.ModuleDict:
    """A layer whose first weight is the part of rank 1 of 2, with a norm that all ranks have."""
    part = torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 4), "norm": torch.nn.LayerNorm(2)})
    layouts.swiglu(part, "fc.weight", 4, rank=1, ranks=2)
    return part


def stepped(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with state."""
    optimizer = torch.optim.AdamW(parameters)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class Held:
    """An object with the state dict of a model in its state."""

    def __init__(self, part: torch.nn.Module) -> None:
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.part.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part.load_state_dict(state["inner"])


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda part, optimizer: {"model": part.state_dict()}, "model.fc.weight"),
        (lambda part, optimizer: part.state_dict(keep_vars=True), "fc.weight"),
        (lambda part, optimizer: {"list": [part["fc"].weight.detach()]}, "list.0"),
        (lambda part, optimizer: {"row": part["fc"].weight.detach()[1]}, "row"),
        (lambda part, optimizer: {"array": part["fc"].weight.detach().numpy()}, "array"),
        (lambda part, optimizer: {"object": Held(part)}, "object.inner.fc.weight"),
        (lambda part, optimizer: {"model": part, "again": part.state_dict()}, "again.fc.weight"),
        (lambda part, optimizer: {"slots": optimizer.state_dict()}, "slots.state.0.exp_avg"),
    ],
    ids=["dict", "kept", "list", "view", "array", "object", "beside the module", "optimizer"],
)
def test_a_part_is_refused_outside_of_its_module(make: Callable[..., dict[str, Any]], key: str) -> None:
    part = model()
    optimizer = stepped(part.parameters())
    state = make(part, optimizer)
    message = (
        rf"^{key} is this rank's part of a model: shardproof\.layouts declares .* "
        r"Save the module itself .*{'model': model, 'optimizer': optimizer}.*PerRank"
    )
    with pytest.raises(StructureError, match=message):
        collect(state)
    assert collect_on(state, world_size=1).tensors, "a rank that saves alone saves its part"
    assert collect({"own": sp.PerRank(state)}).tensors
    saved = collect_on(state, world_size=1)
    stored = {entry.key: (entry.dtype, entry.shape) for entry in saved.tensors}
    catalogue = Catalogue(stored, {}, {item.key: item.value for item in saved.objects}, 2)
    with pytest.raises(StructureError, match=message):
        bind(state, catalogue)
    assert collect({"model": part, "optimizer": optimizer}).tensors, "the advice works"


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_state_dict_of_a_hybrid_optimizer_is_refused(fraction: float) -> None:
    part = model()
    optimizer = sp.optim.HybridDeviceOptimizer(part.parameters(), torch.optim.AdamW, cpu_fraction=fraction)
    for parameter in part.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(StructureError, match=r"^own\.state\.0\.exp_avg is this rank's part"):
        collect({"own": optimizer.state_dict()})


@pytest.mark.parametrize("is_part", [True, False])
def test_a_dtensor_of_a_declared_part_is_refused(is_part: bool) -> None:
    """On the mesh of the data parallel ranks. One with a whole layout is not, nor one on all ranks."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["data"]
        module = torch.nn.Linear(2, 8, bias=False)
        local = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False)
        module.weight = torch.nn.Parameter(local)
        layouts.fused(module, "weight", [16 if is_part else 8], rank=0, ranks=2)
        state = {"model": module.state_dict()}
        with pytest.raises(StructureError, match=r"^model\.weight ") if is_part else nullcontext():
            collect_on(state, world_size=4)
        assert collect_on(state, world_size=2).tensors
    finally:
        dist.destroy_process_group()


def test_other_tensors_are_replicas() -> None:
    """Those of weights that all ranks have, copies, and integers."""
    part = model()
    optimizer = stepped(part.parameters())
    values = part.state_dict()
    copied = values.pop("fc.weight").clone()
    slots = optimizer.state_dict()["state"]
    del slots[0]
    state = {"model": values, "copy": copied, "slots": slots, "random": torch.get_rng_state()}
    assert "model.norm.weight" in {entry.key for entry in collect(state).tensors}


def test_a_load_may_lack_or_exclude_the_key_of_a_part() -> None:
    part = {"part": model()["fc"].weight.detach()}  # type: ignore[index]
    assert bind(part, Catalogue({}, {}, {}, 2)).missing == ["part"]
    stored = {"part": ("float32", (4, 2))}
    assert not bind(part, Catalogue(stored, {}, {}, 2), selected=lambda key: key != "part").tensors


def whole() -> Iterator[torch.nn.Module]:
    """Modules whose layouts only change keys or order: each rank has whole tensors."""
    one = torch.nn.Linear(2, 4)
    layouts.fused(one, "weight", (2, 2), ranks=1)
    yield one
    padded = torch.nn.Embedding(8, 2)
    layouts.vocabulary(padded, "weight", 7)
    yield padded
    stack = torch.nn.Module()
    stack.w = torch.nn.Parameter(torch.ones(2, 3, 4))
    layouts.experts.stacked(stack, "w", transposed=True)
    yield stack
    experts = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
    layouts.experts.sequential(experts)
    yield experts
    names = torch.nn.Module()
    names.w0, names.w1 = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    layouts.experts.numbered(names, "w")
    yield names
    replicated = torch.nn.Linear(2, 4)
    layouts.fused(replicated, "weight", (4,), rank=1, ranks=2, replicated=[0])
    yield replicated
    stage = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    layouts.layers(stage, 0)
    yield stage


def test_layouts_of_whole_tensors_are_replicas() -> None:
    for module in whole():
        assert collect({"model": module.state_dict()}).tensors


def numbered() -> Iterator[tuple[torch.nn.Module, dict[str, str]]]:
    """Modules of a rank with the model's second half, and their own names with those of the model."""
    stage = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
    layouts.layers(stage, 2)
    yield stage, {"0.weight": "2.weight", "1.weight": "3.weight"}
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])})
    layouts.experts.sequential(experts["experts"], first=1, total=2)  # type: ignore[arg-type]
    yield experts, {"experts.0.weight": "experts.1.weight"}
    names = torch.nn.Module()
    names.w0, names.w1 = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    layouts.experts.numbered(names, "w", first=2, total=4)
    yield names, {"w0": "w2", "w1": "w3"}
    layer = torch.nn.Linear(2, 2, bias=False)  # of a list of the program
    layouts.layers([layer], 5)
    yield layer, {"weight": "5.weight"}


def test_the_numbers_of_layers_and_experts_are_refused_unless_keys_have_them() -> None:
    for module, names in numbered():
        state = module.state_dict()
        first = next(iter(names))
        with pytest.raises(StructureError, match=rf"^model\.{first} is this rank's part"):
            collect({"model": state})
        renamed = {names[name]: item for name, item in state.items()}
        assert len(collect({"model": renamed}).tensors) == len(names)
        optimizer = stepped(module.parameters())
        with pytest.raises(StructureError, match=r"^optimizer\.state\.0\.exp_avg is this rank's part"):
            collect({"optimizer": optimizer.state_dict()})


def test_layers_within_layers_have_all_numbers_of_the_model() -> None:
    experts = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
    stage = torch.nn.ModuleList([torch.nn.ModuleDict({"experts": experts})])
    layouts.experts.sequential(experts, first=1, total=2)  # type: ignore[arg-type]
    layouts.layers(stage, 4)
    value = experts[0].weight.detach()
    for key in ("0.experts.0.weight", "4.experts.0.weight", "0.experts.1.weight"):
        with pytest.raises(StructureError, match=f"^{key} "):
            collect({key: value})
    assert collect({"4.experts.1.weight": value}).tensors
    for key in (
        "layers.0.mlp.experts.1.up.weight",
        "layers.4.mlp.experts.0.up.weight",
        "layers.1.up.4.weight",
    ):
        with pytest.raises(StructureError, match=f"^{key} "):
            collect({key: value})
    for key in (
        "layers.4.mlp.experts.1.up.weight",
        "layers.4._orig_mod.experts.1.weight",
        "0.4.1.up.0.weight",
    ):
        assert collect({key: value[:1]}).tensors, key
    inner = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
    deep = torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.ReLU(), inner])])
    layouts.experts.sequential(inner, first=0, total=2)
    layouts.layers(deep, 1)
    with pytest.raises(StructureError, match=r"^0\.1\.moe\.0\.up "):  # the 1 is no layer's number
        collect({"0.1.moe.0.up": inner[0].weight.detach()})


def test_keys_with_the_numbers_may_have_other_names() -> None:
    """Those of another library, of a view, and of wrappers. Its own numbers and positions are refused."""
    stage = torch.nn.ModuleList([torch.nn.ModuleDict({"attn": torch.nn.Sequential(torch.nn.Linear(2, 2))})])
    stage[0]["attn"].insert(0, torch.nn.ReLU())  # type: ignore[index, union-attr]
    layouts.layers(stage, 1)
    names = torch.nn.ModuleList([torch.nn.Module()])
    names[0].w0 = torch.nn.Parameter(torch.ones(2))
    layouts.experts.numbered(names[0], "w", first=2, total=4)
    layouts.layers(names, 4)
    value, expert = stage[0]["attn"][1].weight.detach(), names[0].w0.detach()  # type: ignore[index, union-attr]
    optimizer = stepped(stage.parameters())
    slot = optimizer.state[stage[0]["attn"][1].weight]["exp_avg"]  # type: ignore[index, union-attr]
    for allowed, tensor in (
        ("model.layers.1.self_attn.q_proj.weight", value),
        ("model.layers.1.attn.1.q.weight", value[:1]),
        ("model.layers.1.experts.0.weight", value[0]),
        ("model.layers.1.rows.0", value[0]),
        ("model.0.layers.1.attn.1.q.weight", value),
        ("model.layers.1._orig_mod.attn.1.weight", value),
        ("model.layers.1._checkpoint_wrapped_module.attn.1.weight", value),
        ("optimizer.layers.1.self_attn.q_proj.weight.exp_avg", slot),
        ("exp_avg.layers.1._orig_mod.attn.1.weight", slot),
        ("layers.4.mlp.w2", expert),
        ("layers.4.mlp.experts.2.up.weight", expert),
    ):
        assert collect({allowed: tensor}).tensors, allowed
    for refused, tensor in (
        ("optimizer.layers.0.attn.1.weight.exp_avg", slot),
        ("model.layers.0.self_attn.q_proj.weight", value),
        ("model.layers.0.attn.1.weight", value),
        ("model.layers.0.attn.1.q.weight", value[:1]),
        ("model.layers.0._orig_mod.attn.1.weight", value),
        ("model.attn.weight", value),
        ("weights.1", value),
        ("groups.1.0", value),
        ("optimizers.1.state.1.exp_avg", slot),
        ("layers.4.mlp.w0", expert),
        ("layers.4.mlp.experts.0.up.weight", expert),
    ):
        with pytest.raises(StructureError, match=f"^{refused} "):
            collect({refused: tensor})


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_that_the_ranks_divide_are_refused(stacked: bool) -> None:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.ones(2, 3, 4))
    if stacked:
        layouts.experts.stacked(module, "w", first=2, total=4)
    else:
        layouts.experts.grouped(module, "w", count=2, along=0, first=2, total=4)
    with pytest.raises(StructureError, match=r"^w "):
        collect(module.state_dict())


def test_padding_of_a_rank_is_refused() -> None:
    table = torch.nn.Embedding(4, 2)
    layouts.vocabulary(table, "weight", 4, rank=1, ranks=2)
    with pytest.raises(StructureError, match=r"^weight "):
        collect(table.state_dict())


def test_an_optimizer_with_names_has_the_layouts_of_the_modules_in_the_tree() -> None:
    part = model()
    optimizer = stepped(part.parameters())
    named = {"optimizer": sp.OptimizerState(optimizer, names=dict(part.named_parameters()))}
    with pytest.raises(StructureError, match=r"^optimizer\.fc\.weight is this rank's part"):
        collect(named)
    for state in ({"model": part, **named}, {**named, "model": part}):
        found = collect(state)
        assert {entry.key: entry.shape for entry in found.tensors}["optimizer.fc.weight.exp_avg"] == (8, 2)
        stored = {entry.key: (entry.dtype, entry.shape) for entry in found.tensors}
        objects = {item.key: item.value for item in found.objects}
        assert bind(state, Catalogue(stored, {}, objects, 2)).tensors
    stage = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    layouts.layers(stage, 3)
    own = sp.OptimizerState(stepped(stage.parameters()), names=dict(stage.named_parameters()))
    with pytest.raises(StructureError, match=r"^optimizer\.0\.weight is this rank's part"):
        collect({"model": stage, "optimizer": own})


def copied(part: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(part)


def unpickled(part: torch.nn.Module) -> torch.nn.Module:
    """As in a process that declares nothing itself."""
    data = pickle.dumps(part)
    process._has_parts = False
    return pickle.loads(data)  # type: ignore[no-any-return]


@pytest.mark.parametrize("again", [copied, unpickled])
def test_a_copy_of_a_module_has_its_parts(again: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    part = model()
    other = again(part)
    del part
    with pytest.raises(StructureError, match=r"^fc\.weight "):
        collect(other.state_dict())


def test_nothing_is_searched_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before a part is declared, and not for a tree without floats outside of modules."""
    monkeypatch.setattr("gc.get_objects", None)
    plain = torch.nn.Linear(2, 2)
    layouts.fused(plain, "weight", (1, 1))
    assert collect({"model": plain.state_dict()}).tensors
    part = model()
    state = {"model": part, "optimizer": stepped(part.parameters()), "random": torch.get_rng_state()}
    assert collect(state).tensors


def test_the_search_disturbs_no_thread_that_makes_tuples() -> None:
    """CPython raises a SystemError there if anything refers to an unfinished tuple."""
    model = torch.nn.Linear(2, 4)
    layouts.fused(model, "weight", (4, 4), rank=0, ranks=2)
    ended = threading.Event()
    errors: list[SystemError] = []

    def make_tuples() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(50))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=make_tuples, daemon=True) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            collect_on({"w": torch.ones(2)}, rank=0, world_size=2)
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        for thread in threads:
            thread.join(60)
    assert errors == []
