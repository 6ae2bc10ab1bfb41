"""Modules of Megatron-Core of which ranks have different parts under one key.

`tests/interop/test_megatron_core.py` has the real ones.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import layouts
from shardproof.errors import StructureError
from shardproof.state import Catalogue, bind
from shardproof.state import collect as collect_on

collect = partial(collect_on, world_size=2)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The numbers of parallel ranks that `megatron.core.parallel_state` returns."""
    numbers = SimpleNamespace(tensor=1, expert=1, expert_tensor=1, pipeline=1)
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: numbers.tensor,
        get_expert_model_parallel_world_size=lambda: numbers.expert,
        get_expert_tensor_parallel_world_size=lambda: numbers.expert_tensor,
        get_pipeline_model_parallel_world_size=lambda: numbers.pipeline,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    return numbers


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
    setattr(ranks, kind, 2)
    with pytest.raises(StructureError, match=rf"^model\.layers\.1\.fc\.weight .*layouts\.{declaration}"):
        collect({"model": model})
    optimizer = sp.OptimizerState(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(StructureError, match=rf"^optimizer\.layers\.1\.fc\.weight .*layouts\.{declaration}"):
        collect({"optimizer": optimizer})
    collect({"model": sp.PerRank(model)})
    layouts.fused(layer["fc"], "weight", [8], rank=0, ranks=2)
    collect({"model": model})


@pytest.mark.parametrize("known_by", ["name", "attribute"])
def test_experts_are_divided_by_the_tensor_parallel_ranks_of_experts(
    ranks: SimpleNamespace, known_by: str
) -> None:
    linear: Any = torch.nn.Linear(2, 4)
    linear.weight.tensor_model_parallel = True  # whatever the size for experts is
    linear.is_expert = known_by == "attribute"
    model = torch.nn.ModuleDict(
        {"experts" if known_by == "name" else "mlp": torch.nn.ModuleDict({"fc": linear})}
    )
    ranks.tensor = 2
    collect({"model": model})
    ranks.tensor, ranks.expert_tensor = 1, 2
    with pytest.raises(StructureError, match=r"on all expert tensor parallel ranks .*shardproof\.PerRank"):
        collect({"model": model})


def test_layers_with_the_numbers_of_their_stage_are_refused(ranks: SimpleNamespace) -> None:
    ranks.pipeline = 2
    collect({"model": stage(0)})
    model = stage(2)
    with pytest.raises(StructureError, match=r"^model\.layers\.0 .*shardproof\.layouts\.layers\. "):
        collect({"model": model})
    layouts.layers(model["layers"], 2)  # type: ignore[arg-type]
    assert {entry.key.split(".")[2] for entry in collect({"model": model}).tensors} == {"2", "3"}


def test_a_rank_that_saves_alone_may_save_its_part(ranks: SimpleNamespace) -> None:
    ranks.pipeline = 2
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
    ranks.tensor = 2
    with pytest.raises(StructureError, match=rf"^{key} .*`{{'model': model\.sharded_state_dict\(\)}}`"):
        collect(state)
    collect({"own": sp.PerRank(state)})


def test_other_tensors_outside_of_modules_are_replicas(ranks: SimpleNamespace) -> None:
    """Those of weights that all ranks have, and those that no module has, such as copies."""
    model = stage(0)
    layer: Any = model["layers"][1]
    layer["fc"].weight.tensor_model_parallel = True
    ranks.tensor = 2
    values = model.state_dict()
    del values["layers.1.fc.weight"]
    assert len(collect({"model": values, "copy": layer["fc"].weight.detach().clone()}).tensors) == 4


def test_the_keys_of_layers_outside_of_modules_have_the_numbers_of_the_model(ranks: SimpleNamespace) -> None:
    ranks.pipeline = 2
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
    ranks.tensor = 2
    state = {"model": model.state_dict()}
    stored = {f"model.{name}": ("float32", tuple(item.shape)) for name, item in model.state_dict().items()}
    catalogue = Catalogue(stored, {}, {}, 2)
    with pytest.raises(StructureError, match=r"^model\.layers\.1\.fc\.weight has this key on all tensor"):
        bind(state, catalogue, world_size=2)
    key = "model.layers.1.fc.weight"
    assert len(bind(state, catalogue, world_size=2, selected=lambda name: name != key).tensors) == 3
