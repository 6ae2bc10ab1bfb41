"""Names in the model: layers of pipeline stages, depths, copies of parameters, wrappers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardproof.engine.state.layout import Layout, declare
from shardproof.errors import StructureError
from shardproof.layouts import experts, layers, rename, shared, swiglu, vocabulary
from shardproof.state import collect
from tests.unit.training.layouts.reference import checkpoint_of, linear, numbered


def keys_of(tree: Any) -> list[str]:
    return [entry.key for entry in collect(tree).tensors]


class Stage(torch.nn.Module):
    """Two layers of four; the embedding on the first stage, copies of it on the last."""

    def __init__(self, rank: int, scale: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [linear(scale * (numbered(2, 2) + 10 * number)) for number in (2 * rank, 2 * rank + 1)]
        )
        layers(self.layers, 2 * rank)
        if rank == 0:
            self.embedding = linear(scale * numbered(5, 2))
        else:
            self.output = linear(scale * numbered(5, 2))
            shared(self, "output.weight", "embedding.weight")
            self.mtp = torch.nn.ModuleList(
                [torch.nn.ModuleDict({"embedding": linear(scale * numbered(5, 2))})]
            )
            shared(self.mtp[0], "embedding.weight", "embedding.weight")


def stages(scale: float) -> list[dict[str, Any]]:
    made = []
    for rank in range(2):
        model = Stage(rank, scale)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        made.append({"model": model, "optimizer": optimizer})
    return made


def test_stages_have_the_models_numbers_and_store_copies_once() -> None:
    checkpoint = checkpoint_of(stages(1.0))
    for number in range(4):
        assert torch.equal(checkpoint.full[f"model.layers.{number}.weight"], numbered(2, 2) + 10 * number)
    assert torch.equal(checkpoint.full["model.embedding.weight"], numbered(5, 2))
    slot = checkpoint.full["optimizer.embedding.weight.exp_avg"]
    torch.testing.assert_close(slot, 0.1 * numbered(5, 2))
    assert not [key for key in checkpoint.catalogue.tensors if "mtp" in key or "output" in key]
    for state, expected in zip(stages(0.0), stages(1.0), strict=True):
        checkpoint.load(state, exact=False)
        for got, wanted in zip(state["model"].parameters(), expected["model"].parameters(), strict=True):
            assert torch.equal(got, wanted)
            slots, others = state["optimizer"].state[got], expected["optimizer"].state[wanted]
            assert torch.equal(slots["exp_avg"], others["exp_avg"])
            assert slots["step"] == 1


def test_a_copy_beside_its_original_is_stored_once_and_loaded_into_both() -> None:
    def model(scale: float) -> torch.nn.ModuleDict:
        made = torch.nn.ModuleDict(
            {"head": linear(scale * numbered(3, 2)), "table": linear(scale * numbered(3, 2))}
        )
        shared(made, "head.weight", "table.weight")
        return made

    for order in ("head", "table"), ("table", "head"):
        saved = torch.nn.ModuleDict({name: model(1.0)[name] for name in order})
        checkpoint = checkpoint_of([saved])
        assert list(checkpoint.catalogue.tensors) == ["table.weight"]
        target = model(0.0)
        checkpoint.load(target)
        assert torch.equal(target["head"].weight, numbered(3, 2))
        assert torch.equal(target["table"].weight, numbered(3, 2))


def test_two_tensors_of_one_key_are_refused_unless_declared() -> None:
    blocks = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    rename(blocks["a"], "x")
    rename(blocks["b"], "x")
    with pytest.raises(StructureError, match=r"two values have the key 'x.weight'"):
        collect(blocks)
    other = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(3, 2)})
    shared(other, "b.weight", "a.weight")
    with pytest.raises(StructureError, match=r"the same key 'a.weight', but are .* \[2, 2\] and .* \[2, 3\]"):
        collect(other)


def test_segments_are_renamed_and_left_out() -> None:
    model = torch.nn.ModuleDict(
        {"decoder": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([linear(numbered(1, 1))])})}
    )
    layers(model["decoder"]["layers"], 12)
    assert keys_of(model) == ["decoder.layers.12.weight"]
    rename(model["decoder"], "")
    assert keys_of({"m": model}) == ["m.layers.12.weight"]
    with pytest.raises(StructureError, match="is not one segment of a key"):
        rename(model["decoder"], "a.b")
    with pytest.raises(ValueError, match="first layer must not be negative, found -1"):
        layers(model["decoder"]["layers"], -1)


def moe(scale: float) -> torch.nn.ModuleDict:
    block = torch.nn.ModuleDict({"experts": torch.nn.ModuleList()})
    for number in range(2):
        expert = torch.nn.ModuleDict({"fc1": linear(scale * (numbered(4, 2) + 100 * number))})
        swiglu(expert, "fc1.weight", 2)
        block["experts"].append(expert)
    experts.sequential(block["experts"], first=2, total=6)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})
    layers(model["layers"], 4)
    return model


def _checkpointed(model: torch.nn.Module) -> torch.nn.Module:
    for block in model["layers"]:
        for number, expert in enumerate(block["experts"]):
            block["experts"][number] = checkpoint_wrapper(expert)
    model["layers"][0] = checkpoint_wrapper(model["layers"][0])
    return model


def _compiled(model: torch.nn.Module) -> torch.nn.Module:
    for block in model["layers"]:
        block["experts"][0] = torch.compile(block["experts"][0])
    return torch.compile(model)


def _parallel(model: torch.nn.Module) -> torch.nn.Module:
    model["layers"][0] = torch.nn.DataParallel(model["layers"][0])
    return torch.nn.DataParallel(model)


@pytest.mark.parametrize("wrap", [_checkpointed, _compiled, _parallel, copy.deepcopy, lambda model: model])
def test_wrappers_change_neither_names_nor_layouts(wrap: Any) -> None:
    expected = collect(moe(1.0)).tensors
    wrapped = wrap(moe(1.0))
    optimizer = torch.optim.SGD(wrapped.parameters(), momentum=0.5)
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    entries = collect({"m": wrapped, "o": optimizer}).tensors
    assert [entry.key for entry in entries] == [
        "m.layers.4.experts.fc1.weight",
        "o.layers.4.experts.fc1.weight.momentum_buffer",
    ]
    for entry in entries:
        assert entry.shape == expected[0].shape == (6, 4, 2)
        assert [piece.offsets for piece in entry.pieces] == [piece.offsets for piece in expected[0].pieces]


def test_layouts_are_declared_through_wrappers() -> None:
    model = _checkpointed(
        torch.nn.ModuleDict(
            {
                "layers": torch.nn.ModuleList(
                    [torch.nn.ModuleDict({"experts": torch.nn.ModuleList(), "fc": linear(numbered(4, 2))})]
                )
            }
        )
    )
    swiglu(model["layers"][0], "fc.weight", 4, ranks=2)
    layers(model["layers"], 7)
    (entry,) = collect(model).tensors
    assert (entry.key, entry.shape) == ("layers.7.fc.weight", (8, 2))
    assert [piece.offsets for piece in entry.pieces] == [(0, 0), (4, 0)]


def test_a_module_with_its_own_state_dict_has_its_layout_and_keeps_its_padding() -> None:
    class Copying(torch.nn.Embedding):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {name: tensor.clone() for name, tensor in super().state_dict().items()}

    def table(value: float) -> Copying:
        made = Copying(4, 2, _weight=torch.full((4, 2), value))
        vocabulary(made, "weight", 3)
        return made

    target = table(-1.0)
    checkpoint_of([table(2.0)]).load(target)
    assert torch.equal(target.weight, torch.tensor([[2.0, 2.0]] * 3 + [[-1.0, -1.0]]))


def test_the_meta_device_is_refused_by_name() -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 4, bias=False)
    swiglu(layer, "weight", 2)
    with pytest.raises(StructureError, match="m.weight: the tensor is on the meta device"):
        collect({"m": layer})
    assert len(collect(layer.to_empty(device="cpu")).tensors) == 1


def test_a_shape_that_changes_after_the_declaration_is_refused_by_name() -> None:
    layer = torch.nn.Linear(2, 4, bias=False)
    swiglu(layer, "weight", 2)
    layer.weight = torch.nn.Parameter(torch.zeros(6, 2))
    with pytest.raises(StructureError, match=r"m.weight has shape \[6, 2\], but its declared layout has"):
        collect({"m": layer})


def test_a_module_in_two_places_has_its_layout_in_both() -> None:
    model = torch.nn.ModuleDict({"a": linear(numbered(2, 2))})
    model["b"] = model["a"]
    declare(model["a"], "weight", Layout.whole((2, 2)).expert(1, 4))
    entries = {entry.key: entry for entry in collect({"model": model}).tensors}
    assert {key: entry.shape for key, entry in entries.items()} == {
        "model.a.weight": (4, 2, 2),
        "model.b.weight": (4, 2, 2),
    }


def test_names_come_from_an_overridden_named_parameters() -> None:
    class Engine(torch.nn.Module):
        # Holds its model in an attribute that torch does not register.

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            object.__setattr__(self, "model", model)

        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

        def named_parameters(self, *args: Any, **options: Any) -> Any:
            return self.model.named_parameters(*args, **options)

    engine = Engine(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(engine.parameters(), lr=1.0, momentum=0.9)
    for parameter in engine.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert keys_of({"engine": engine, "optimizer": optimizer}) == [
        "engine.bias",
        "engine.weight",
        "optimizer.bias.momentum_buffer",
        "optimizer.weight.momentum_buffer",
    ]
