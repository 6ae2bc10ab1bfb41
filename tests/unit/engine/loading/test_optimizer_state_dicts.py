"""Live optimizers and state dicts of torch optimizers fill each other: slots, options and groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import shardproof as sp
from shardproof.engine.loading import ForeignCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(torch.nn.Module):
    """The head's weight, tied to the embedding, is first in the order of keys, and last in torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.body = torch.nn.Linear(4, 4)
        self.a_head = torch.nn.Linear(4, 6, bias=False)
        self.a_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.a_head(self.body(self.embed(tokens)))
        return hidden


def optimizer_of(model: torch.nn.Module, lr: Any = 9.0) -> torch.optim.Optimizer:
    """AdamW with two groups, of which the biases have no weight decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [item for item in parameters if item.dim() > 1]},
        {"params": [item for item in parameters if item.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, foreach=False)


def trained(lr: Any = 0.25) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Tied()
    optimizer = optimizer_of(model, lr)
    for _ in range(2):
        model(torch.arange(6)).square().sum().backward()
        optimizer.step()
    optimizer.param_groups[1]["betas"] = (0.5, 0.75)
    return model, optimizer


def fresh(lr: Any = 9.0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = Tied()
    return model, optimizer_of(model, lr)


def assert_same(
    found: tuple[torch.nn.Module, torch.optim.Optimizer],
    expected: tuple[torch.nn.Module, torch.optim.Optimizer],
) -> None:
    for one, other in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(one, other)
        slots, other_slots = found[1].state[one], expected[1].state[other]
        assert slots.keys() == other_slots.keys()
        for slot, item in other_slots.items():
            assert torch.equal(slots[slot], item) and slots[slot].dtype == item.dtype
    for group, other_group in zip(found[1].param_groups, expected[1].param_groups, strict=True):
        for name in set(other_group) - {"params"}:
            assert group[name] == other_group[name], name


def _with_dcp(model: Any, optimizer: Any, path: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path, no_dist=True)


def _with_dcp_flattened(model: Any, optimizer: Any, path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path, no_dist=True)


def _with_torch_save(model: Any, optimizer: Any, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, path)


def _as_own_tree(model: Any, optimizer: Any, path: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    sp.save(path, {"model": model_state, "optim": optimizer_state})


def _as_own_tree_by_number(model: Any, optimizer: Any, path: Path) -> None:
    state = optimizer.state_dict()
    sp.save(
        path, {"model": model, "optim": {**state, "state": {str(k): v for k, v in state["state"].items()}}}
    )


def _without_lists_of_parameters(model: Any, optimizer: Any, path: Path) -> None:
    """As DeepSpeed's engines are read: groups by number, parameters by name."""
    _, optimizer_state = get_state_dict(model, optimizer)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer_state["param_groups"]]
    state = {"state": optimizer_state["state"], "param_groups": groups}
    sp.save(path, {"model": model, "optim": state})


WRITERS: list[Callable[[Any, Any, Path], None]] = [
    _with_dcp,
    _with_dcp_flattened,
    _with_torch_save,
    _as_own_tree,
    _as_own_tree_by_number,
    _without_lists_of_parameters,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_a_state_dict_fills_a_fresh_optimizer(
    write: Callable[[Any, Any, Path], None], lr: Any, tmp_path: Path
) -> None:
    """Strictly: no key is left over or missing. The tied weight has another name in torch's state dict."""
    source, target = trained(lr), fresh()
    write(*source, tmp_path / "stored")
    sp.load(tmp_path / "stored", {"model": target[0], "optim": target[1]})
    assert_same(target, source)


def test_a_rename_finds_the_state_dict(tmp_path: Path) -> None:
    source, target = trained(), fresh()
    _with_dcp(*source, tmp_path / "stored")
    sp.load(
        tmp_path / "stored",
        {"net": target[0], "runs": {"adam": target[1]}},
        rename={"net": "model", "runs.adam": "optim"},
    )
    assert_same(target, source)


def test_an_optimizer_that_is_the_whole_state_is_filled(tmp_path: Path) -> None:
    source, target = trained(), fresh()
    torch.save(source[1].state_dict(), tmp_path / "optimizer.pt")
    sp.load(tmp_path / "optimizer.pt", sp.OptimizerState(target[1], target[0]))
    sp.load(source_model(source[0], tmp_path), target[0])
    assert_same(target, source)


def source_model(model: torch.nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def test_selection_applies_to_the_names_of_the_live_optimizer(tmp_path: Path) -> None:
    source, target = trained(), fresh()
    _with_dcp(*source, tmp_path / "stored")
    sp.load(
        tmp_path / "stored",
        {"optim": sp.OptimizerState(target[1], target[0])},
        include=["optim.*.exp_avg", "optim.*.@options"],
    )
    assert all(set(slots) == {"exp_avg"} for slots in target[1].state.values())
    assert target[1].param_groups[0]["lr"] == 0.25


def without_a_file(checkpoint: Path, key: str) -> None:
    """Removes the file of a tensor."""
    with sp.open(checkpoint) as opened:
        assert isinstance(opened, ForeignCheckpoint)
        (checkpoint / opened.boxes[opened.row(key)].file).unlink()


def test_a_selected_load_checks_the_files_of_the_live_optimizers_keys_before_it_overwrites(
    tmp_path: Path,
) -> None:
    """The live optimizer has `optim.body.weight.*` for the keys `optim.state.1.*` of the checkpoint."""
    source, target, before = trained(), fresh(), fresh()
    _as_own_tree_by_number(*source, tmp_path / "source")
    sp.convert(tmp_path / "source", tmp_path / "zarr", to="zarr")
    without_a_file(tmp_path / "zarr", "optim.state.1.exp_avg")
    state = {"model": target[0], "optim": sp.OptimizerState(target[1], target[0])}
    with pytest.raises(sp.StorageError, match=r"is missing: .*optim\.state\.1\.exp_avg") as caught:
        sp.load(tmp_path / "zarr", state, include=["model", "optim.body.weight.*"])
    assert "overwritten" not in caught.value.details
    assert_same(target, before)
    sp.load(tmp_path / "zarr", state, exclude=["optim.body.weight.*"])
    assert torch.equal(target[0].embed.weight, source[0].embed.weight)


def test_a_parameter_without_stored_state_is_missing(tmp_path: Path) -> None:
    source, target = trained(), fresh()
    model_state, optimizer_state = get_state_dict(*source)
    del optimizer_state["state"]["body.bias"]
    optimizer_state["param_groups"][1]["params"].remove("body.bias")
    optimizer_state["state"]["other.bias"] = {"exp_avg": torch.ones(2)}
    sp.save(tmp_path / "stored", {"model": model_state, "optim": optimizer_state})
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path / "stored", {"model": target[0], "optim": target[1]})
    assert caught.value.details["missing"] == ["optim.body.bias.@options"]
    assert caught.value.details["unexpected"] == ["optim.state.other.bias.exp_avg"]


def test_options_of_parameters_that_the_target_lacks_are_unexpected(tmp_path: Path) -> None:
    """Also in a flattened state dict without slots."""
    source, (model, _) = trained(), fresh()
    for parameter in source[0].parameters():
        source[1].state[parameter].clear()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    _, optimizer_state = get_state_dict(source[0], torch.optim.SGD(source[0].parameters()), options=options)
    sp.save(tmp_path / "stored", {"optim": optimizer_state})
    fewer = torch.optim.SGD([model.body.weight])  # type: ignore[union-attr,list-item]
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path / "stored", {"optim": sp.OptimizerState(fewer, model)})
    assert "optim.param_groups.body.bias.lr" in caught.value.details["unexpected"]
    assert not any("body.weight" in key for key in caught.value.details["unexpected"])


def test_options_that_are_not_stored_are_missing(tmp_path: Path) -> None:
    """Strictly, since the run would go on with another learning rate."""
    source, target = trained(), fresh()
    model_state, optimizer_state = get_state_dict(*source)
    sp.save(tmp_path / "stored", {"model": model_state, "optim": {"state": optimizer_state["state"]}})
    state = {"model": target[0], "optim": target[1]}
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path / "stored", state)
    assert len(caught.value.details["missing"]) == 3
    report = sp.load(tmp_path / "stored", state, strict=False)
    assert len(report.missing) == 3
    assert all(set(slots) == {"exp_avg", "exp_avg_sq", "step"} for slots in target[1].state.values())


def test_another_number_of_parameters_is_refused(tmp_path: Path) -> None:
    source, (model, _) = trained(), fresh()
    torch.save(source[1].state_dict(), tmp_path / "optimizer.pt")
    fewer = torch.optim.AdamW([model.embed.weight])  # type: ignore[union-attr,list-item]
    with pytest.raises(sp.StructureError, match="has 3 parameters by number, and the optimizer has 1"):
        sp.load(tmp_path / "optimizer.pt", sp.OptimizerState(fewer, model))
    assert not fewer.state


def test_learning_rates_that_differ_in_one_group_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(torch.tensor(0.25))
    optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
    _with_dcp_flattened(model, optimizer, tmp_path / "stored")
    target = Tied()
    one_group = torch.optim.AdamW(target.parameters(), foreach=False)
    with pytest.raises(sp.KeyMismatchError, match="in the same group"):  # weight decay and betas
        sp.load(tmp_path / "stored", {"model": target, "optim": one_group})
    optimizer.param_groups[1].update({k: optimizer.param_groups[0][k] for k in ("weight_decay", "betas")})
    _with_dcp_flattened(model, optimizer, tmp_path / "again")
    with pytest.raises(sp.StructureError, match="different values of lr"):
        sp.load(tmp_path / "again", {"model": target, "optim": one_group})


@pytest.mark.parametrize("to", ["dcp", "fsdp_dtensor"])
def test_a_live_optimizer_is_written_as_a_state_dict(to: str, tmp_path: Path) -> None:
    """`dcp.load` and `set_state_dict` resume from it, and shardproof reads it back."""
    source = trained()
    sp.save(tmp_path / "own", {"model": source[0], "optim": source[1]})
    report = sp.convert(tmp_path / "own", tmp_path / "theirs", to=to)
    assert report.left_out == ()
    model, optimizer = fresh()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same((model, optimizer), source)
    target = fresh()
    sp.load(tmp_path / "theirs", {"model": target[0], "optim": target[1]})
    assert_same(target, source)


def test_a_renamed_optimizer_is_written_under_its_new_name(tmp_path: Path) -> None:
    source = trained()
    sp.save(tmp_path / "own", {"model": source[0], "optim": source[1]})
    sp.convert(tmp_path / "own", tmp_path / "renamed", to="shardproof", rename={"optim": "runs.adam"})
    sp.convert(tmp_path / "renamed", tmp_path / "dcp", to="dcp", rename={"runs.adam": "optimizer"})
    keys = set(sp.open(tmp_path / "dcp"))
    assert {"optimizer.param_groups", "optimizer.state.body.bias.exp_avg"} <= keys
    target = fresh()
    sp.load(tmp_path / "dcp", {"model": target[0], "optimizer": target[1]})
    assert_same(target, source)


def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    """As in a safetensors file. A weight that shares no memory is still missing."""
    source, target = Tied(), Tied()
    state = source.state_dict()
    del state["a_head.weight"]
    torch.save(state, tmp_path / "model.pt")
    sp.load(tmp_path / "model.pt", target)
    assert torch.equal(target.a_head.weight, source.embed.weight)
    untied = Tied()
    untied.a_head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    with pytest.raises(sp.KeyMismatchError) as caught:
        sp.load(tmp_path / "model.pt", untied)
    assert caught.value.details["missing"] == ["a_head.weight"]


def test_an_optimizer_with_its_own_storage_is_filled(tmp_path: Path) -> None:
    """A `SlotProvider` receives the slots and the options of a state dict as those of its own checkpoints."""
    source = trained()
    torch.manual_seed(5)
    model = Tied()
    hybrid = sp.optim.HybridDeviceOptimizer(model.parameters(), torch.optim.AdamW, cpu_fraction=0.5, lr=9.0)
    options = {"weight_decay": 0.0, "betas": (0.5, 0.75)}
    source[1].param_groups[0].update(options)
    _with_dcp(*source, tmp_path / "one-group")
    sp.load(tmp_path / "one-group", {"model": model, "optim": hybrid})
    sp.save(tmp_path / "own", {"model": model, "optim": hybrid})
    target = fresh()
    sp.load(tmp_path / "own", {"model": target[0], "optim": target[1]})
    assert_same(target, source)
