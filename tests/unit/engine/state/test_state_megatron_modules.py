"""Modules of Megatron-Core of which ranks have different parts under one key.

`tests/interop/test_megatron_core.py` has the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardproof as sp
from shardproof import layouts
from shardproof.errors import StructureError
from shardproof.state import Catalogue
from shardproof.state import bind as bind_on
from shardproof.state import collect as collect_on

collect = partial(collect_on, world_size=4)
bind = partial(bind_on, world_size=4)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The parallel groups of rank 0 among 4 ranks, which `megatron.core.parallel_state` returns."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    members = SimpleNamespace(tensor=[0], expert=[0], expert_tensor=[0], pipeline=[0])
    state = SimpleNamespace(model_parallel_is_initialized=lambda: True)
    names = {"tensor": "tensor_model", "expert": "expert_model", "pipeline": "pipeline_model"}
    for kind in vars(members):
        get = partial(lambda kind: dist.new_group(getattr(members, kind)), kind)
        setattr(state, f"get_{names.get(kind, kind)}_parallel_group", get)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    yield members
    dist.destroy_process_group()


def stage(first: int) -> torch.nn.ModuleDict:
    """The layers of a pipeline stage, with the attributes that Megatron-Core sets."""
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 4)}) for _ in range(2))
    for number, layer in enumerate(layers, first + 1):
        layer.layer_number = number
    return torch.nn.ModuleDict({"layers": layers})


@pytest.mark.parametrize(
    ("kind", "attribute", "value", "declaration"),
    [("tensor", "tensor_model_parallel", True, "fused or swiglu"), ("expert", "allreduce", False, "experts")],
)
def test_a_divided_weight_without_a_layout_is_refused(
    ranks: SimpleNamespace, kind: str, attribute: str, value: bool, declaration: str
) -> None:
    model = stage(0)
    layer: Any = model["layers"][1]
    setattr(layer["fc"].weight, attribute, value)
    collect({"model": model})
    setattr(ranks, kind, [0, 1])
    with pytest.raises(StructureError, match=rf"^model\.layers\.1\.fc\.weight .*layouts\.{declaration}"):
        collect({"model": model})
    optimizer = sp.OptimizerState(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(StructureError, match=rf"^optimizer\.layers\.1\.fc\.weight .*layouts\.{declaration}"):
        collect({"optimizer": optimizer})
    collect({"model": sp.PerRank(model)})
    layouts.fused(layer["fc"], "weight", [8], rank=0, ranks=2)
    collect({"model": model})


@pytest.mark.parametrize("known_by", ["name", "attribute", "class"])
def test_experts_are_divided_by_the_tensor_parallel_ranks_of_experts(
    ranks: SimpleNamespace, known_by: str
) -> None:
    linear: Any = torch.nn.Linear(2, 4)
    if known_by != "class":
        linear.weight.tensor_model_parallel = True  # whatever the size for experts is
    linear.is_expert = known_by == "attribute"
    inner = torch.nn.ModuleDict({"fc": linear})
    model = torch.nn.ModuleDict({"mlp" if known_by == "attribute" else "experts": inner})
    if known_by == "class":
        model.__class__ = type("MoELayer", (torch.nn.ModuleDict,), {"__module__": "megatron.core.moe"})
    ranks.tensor = [0, 1]
    collect({"model": model})
    ranks.tensor, ranks.expert_tensor = [0], [0, 1]
    with pytest.raises(StructureError, match=r"among 2 expert tensor parallel ranks.*shardproof\.PerRank"):
        collect({"model": model})


def test_layers_with_the_numbers_of_their_stage_are_refused(ranks: SimpleNamespace) -> None:
    ranks.pipeline = [0, 2]
    collect({"model": stage(0)})
    model = stage(2)
    with pytest.raises(StructureError, match=r"^model\.layers\.0 .*shardproof\.layouts\.layers\. "):
        collect({"model": model})
    layouts.layers(model["layers"], 2)  # type: ignore[arg-type]
    assert {entry.key.split(".")[2] for entry in collect({"model": model}).tensors} == {"2", "3"}


def test_a_rank_that_saves_alone_may_save_its_part(ranks: SimpleNamespace) -> None:
    ranks.pipeline = [0, 2]
    model = stage(2)
    assert collect_on({"model": model, "loose": model.state_dict()}, world_size=1).tensors


class Held:
    """An object with the state dict of a model in its state."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["inner"])


@pytest.mark.parametrize("kind", ["dict", "kept", "list", "object", "flat"])
def test_a_tensor_of_a_divided_weight_is_refused_outside_of_its_module(
    ranks: SimpleNamespace, kind: str
) -> None:
    """It has no mark, and is found by its memory. The key is that of the tensor in the tree."""
    model = stage(0)
    layer: Any = model["layers"][1]
    layer["fc"].weight.tensor_model_parallel = True
    values = model.state_dict()
    state: dict[str, Any] = {
        "dict": {"dict": values},
        "kept": {"kept": model.state_dict(keep_vars=True)},
        "list": {"list": [values["layers.1.fc.weight"]]},
        "object": {"object": Held(model)},
        "flat": values,
    }[kind]
    key = {"list": "list.0", "object": "object.inner.layers.1.fc.weight", "flat": "layers.1.fc.weight"}.get(
        kind, f"{kind}.layers.1.fc.weight"
    )
    collect(state)
    ranks.tensor = [0, 1]
    with pytest.raises(
        StructureError,
        match=rf"^{key} .*`live_state\(model, optimizer\)`, or `{{'model': model\.sharded_state_dict\(\)}}`",
    ):
        collect(state)
    collect({"own": sp.PerRank(state)})


def test_other_tensors_outside_of_modules_are_replicas(ranks: SimpleNamespace) -> None:
    """Those of weights that all ranks have, and those that no module has, such as copies."""
    model = stage(0)
    layer: Any = model["layers"][1]
    layer["fc"].weight.tensor_model_parallel = True
    ranks.tensor = [0, 1]
    values = model.state_dict()
    del values["layers.1.fc.weight"]
    assert len(collect({"model": values, "copy": layer["fc"].weight.detach().clone()}).tensors) == 4


def test_the_keys_of_layers_outside_of_modules_have_the_numbers_of_the_model(ranks: SimpleNamespace) -> None:
    ranks.pipeline = [0, 2]
    model = stage(2)
    with pytest.raises(StructureError, match=r"^model\.layers\.0\.fc\.weight .*pipeline parallel ranks"):
        collect({"model": model.state_dict()})
    renamed = {
        name.replace(".0.", ".2.").replace(".1.", ".3."): item for name, item in model.state_dict().items()
    }
    assert len(collect({"model": renamed}).tensors) == 4


def test_a_load_into_parts_is_refused_for_the_selected_keys(ranks: SimpleNamespace) -> None:
    model = stage(0)
    layer: Any = model["layers"][1]
    layer["fc"].weight.tensor_model_parallel = True
    ranks.tensor = [0, 1]
    state = {"model": model.state_dict()}
    stored = {f"model.{name}": ("float32", tuple(item.shape)) for name, item in model.state_dict().items()}
    catalogue = Catalogue(stored, {}, {}, 2)
    with pytest.raises(
        StructureError, match=r"^model\.layers\.1\.fc\.weight is this rank's part of .* 2 tensor parallel"
    ):
        bind(state, catalogue)
    key = "model.layers.1.fc.weight"
    assert len(bind(state, catalogue, selected=lambda name: name != key).tensors) == 3


def divided() -> torch.nn.ModuleDict:
    """A model of which the second layer's weight is a part."""
    model = stage(0)
    layer: Any = model["layers"][1]
    layer["fc"].weight.tensor_model_parallel = True
    return model


@pytest.mark.parametrize(
    ("saving", "is_refused"), [([0, 2], False), ([0, 1], True), ([0, 3], True), (None, True)]
)
@pytest.mark.parametrize("kind", ["module", "loose"])
def test_ranks_with_the_same_part_save_replicas(
    ranks: SimpleNamespace, kind: str, saving: list[int] | None, is_refused: bool
) -> None:
    """Of tensor parallel groups of ranks 0 and 1, and 2 and 3. Ranks 0 and 3 are in two groups."""
    ranks.tensor = [0, 1]
    model = divided()
    state = {"model": model if kind == "module" else model.state_dict()}
    catalogue = Catalogue({"model.layers.1.fc.weight": ("float32", (4, 2))}, {}, {}, 2)
    world_size = len(saving or range(4))
    for walk in (collect, partial(bind, catalogue=catalogue)):
        with pytest.raises(StructureError, match="this rank's part") if is_refused else nullcontext():
            walk(state, world_size=world_size, ranks=saving)


def test_ranks_that_are_not_known_may_have_the_same_part(ranks: SimpleNamespace) -> None:
    """The ranks of a rendezvous of the program's own, which are fewer than those of the process group."""
    ranks.tensor = [0, 1]
    assert collect({"model": divided()}, world_size=2).tensors


@pytest.mark.parametrize(("dimension", "is_refused"), [("data", True), ("tensor", False), (None, False)])
def test_a_dtensor_is_a_part_on_ranks_outside_of_its_mesh(
    ranks: SimpleNamespace, dimension: str | None, is_refused: bool
) -> None:
    ranks.tensor = [0, 1]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    mesh = mesh if dimension is None else mesh[dimension]
    model = torch.nn.Linear(2, 4)
    local = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)] * mesh.ndim, run_check=False)
    model.weight = torch.nn.Parameter(local)
    model.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    for state in ({"model": model}, {"model": model.state_dict()}):
        with pytest.raises(StructureError, match=r"^model\.weight ") if is_refused else nullcontext():
            collect(state)


def trained(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with state."""
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("of", ["model", "copies"])
def test_the_state_of_an_optimizer_of_parts_is_refused(ranks: SimpleNamespace, of: str) -> None:
    """Copies are the parameters of another dtype that an optimizer of Megatron-Core trains."""
    ranks.tensor = [0, 1]
    model = divided()
    parameters = list(model.parameters())
    if of == "copies":
        parameters = [torch.nn.Parameter(item.detach().clone()) for item in parameters]
        parameters[2].tensor_model_parallel = True  # type: ignore[attr-defined]
    optimizer = trained(parameters)
    plain = optimizer.state_dict()
    state = {"model": sp.PerRank(model.state_dict()), "optimizer": plain}
    with pytest.raises(StructureError, match=r"^optimizer\.state\.2\.exp_avg .*'optimizer': \.\.\."):
        collect(state)
    collect({"own": sp.PerRank({"model": model.state_dict(), "optimizer": plain})})
    del plain["state"][2]
    collect(state)
    if of == "copies":
        with pytest.raises(StructureError, match=r"^main\.2 "):
            collect({"main": [item.detach() for item in parameters]})


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_an_optimizer_with_named_parts_is_refused(ranks: SimpleNamespace, kind: str) -> None:
    model = divided() if kind == "tensor" else stage(2)
    optimizer = trained(list(model.parameters()))
    state = {"optimizer": sp.OptimizerState(optimizer, names=dict(model.named_parameters()))}
    found = collect(state)
    stored = {entry.key: (entry.dtype, entry.shape) for entry in found.tensors}
    catalogue = Catalogue(stored, {}, {item.key: item.value for item in found.objects}, 4)
    assert bind(state, catalogue).tensors
    setattr(ranks, kind, [0, 1])
    for walk in (collect, partial(bind, catalogue=catalogue)):
        with pytest.raises(StructureError, match=rf"^optimizer\.layers\..*2 {kind} parallel ranks"):
            walk(state)


def test_the_state_of_an_optimizer_of_a_pipeline_stage_is_refused(ranks: SimpleNamespace) -> None:
    """Unless its keys have the numbers of the layers."""
    ranks.pipeline = [0, 2]
    model = stage(0)
    optimizer = trained(list(model.parameters()))
    state = optimizer.state_dict()["state"]
    with pytest.raises(StructureError, match=r"^state\.0\.exp_avg .*2 pipeline parallel ranks"):
        collect({"state": state})
    collect({"state": {f"layers.{number // 2}.fc.{number % 2}": item for number, item in state.items()}})


def test_tensors_that_share_memory_with_a_part_are_refused(ranks: SimpleNamespace) -> None:
    ranks.tensor = [0, 1]
    model = divided()
    weight = model["layers"][1]["fc"].weight.detach()  # type: ignore[index]
    values = {"flat": weight.view(-1), "turned": weight.T, "row": weight[1:2], "array": weight.numpy()}
    for name, value in values.items():
        with pytest.raises(StructureError, match=rf"^{name} "):
            collect({name: value})
        dtype, shape = "float32", tuple(value.shape)
        with pytest.raises(StructureError, match=rf"^{name} "):
            bind({name: value}, Catalogue({name: (dtype, shape)}, {}, {}, 4))
        with pytest.raises(StructureError, match=r"^list\.0 "):
            bind({"list": [value]}, Catalogue({"list.0": (dtype, shape)}, {}, {}, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_memory_take_no_part(ranks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have errors of their own. Tensors that are no floats need no search of the process."""
    ranks.tensor = [0, 1]
    with pytest.raises(StructureError, match="layout torch.sparse_coo cannot be stored"):
        collect({"sparse": torch.eye(3).to_sparse()})
    with pytest.raises(StructureError, match="on the meta device"):
        collect({"meta": torch.ones(3, device="meta")})
    with pytest.raises(StructureError, match="nested tensors cannot be stored"):
        collect({"nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])})
    monkeypatch.setattr("gc.get_objects", None)
    assert len(collect({"random": torch.get_rng_state(), "empty": torch.ones(0)}).tensors) == 2


def test_a_load_of_an_object_with_parts_is_refused(ranks: SimpleNamespace) -> None:
    held = Held(divided())
    found = collect({"object": held})
    stored = {entry.key: (entry.dtype, entry.shape) for entry in found.tensors}
    catalogue = Catalogue(stored, {}, {item.key: item.value for item in found.objects}, 4)
    assert bind({"object": held}, catalogue).finish
    ranks.tensor = [0, 1]
    with pytest.raises(StructureError, match=r"^object\.inner\.layers\.1\.fc\.weight is this rank's part"):
        bind({"object": held}, catalogue)


def test_a_load_may_lack_the_key_of_a_part(ranks: SimpleNamespace) -> None:
    """It fills nothing, and reports the key as missing."""
    ranks.tensor = [0, 1]
    model = divided()
    state = {"part": list(model.parameters())[2].detach()}
    assert bind(state, Catalogue({}, {}, {}, 4)).missing == ["part"]


class _Comparable(type):
    """Its classes have no hash."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


class _Unhashable(metaclass=_Comparable):
    pass


class _Unrelated(torch.nn.Module):
    """A module whose methods fail."""

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        raise AssertionError

    named_modules = named_children = parameters = named_parameters

    def __getattr__(self, name: str) -> Any:
        raise AssertionError


class _Hiding(torch.nn.Module):
    """A module that lists none of its parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return iter(())


def test_the_search_calls_no_method_of_other_objects(ranks: SimpleNamespace) -> None:
    ranks.tensor = [0, 1]
    model = divided()
    others = [_Unrelated(), _Hiding(model), _Unhashable()]
    others[0].self = [others]  # the garbage collector tracks an object with a container
    others[2].own = [others]  # type: ignore[attr-defined]
    with pytest.raises(StructureError, match=r"^model\.layers\.1\.fc\.weight "):
        collect({"model": model.state_dict()})
    assert len(collect({"copy": torch.ones(3)}).tensors) == 1


def test_experts_of_another_framework_are_replicas(ranks: SimpleNamespace) -> None:
    """By their names alone, these of a teacher model would be parts."""
    ranks.expert, ranks.expert_tensor = [0, 1], [0, 1]
    teacher = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    assert len(collect({"teacher": teacher, "copy": teacher.state_dict()}).tensors) == 4


def test_keys_of_its_own_do_not_tell_the_part_of_a_rank(ranks: SimpleNamespace) -> None:
    """The error's advice works, also for a load on this number of ranks."""
    ranks.tensor = [0, 1]
    model = divided()
    optimizer = trained(list(model.parameters()))
    with pytest.raises(StructureError, match=r"^tp0\.layers.* Use it also if the ranks have different keys"):
        collect({"tp0": model.state_dict()})
    own = {"own": sp.PerRank({"model": model, "optimizer": optimizer})}
    assert {entry.key.split(".")[1] for entry in collect(own).tensors} == {"@rank-0"}
