"""The state of the hybrid optimizer: described and received as slots, and as a state dict of torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.engine.state.optimizer.slots import MASTER, Receipt, SlotProvider, StoredSlot
from shardproof.optim import HybridDeviceOptimizer
from tests.unit.training.optim.hybrid_samples import (
    RULES,
    equal,
    hybrid,
    late_copies,
    model_of,
    plain,
    train,
    values,
)

FRACTIONS = [0.0, 0.5, 1.0]
SlotCopies = list[dict[str, Any]]


def copied_slots(optimizer: HybridDeviceOptimizer) -> SlotCopies:
    """A copy of all slots, by parameter."""
    return [
        {slot: item.clone() for slot, item in slots.tensors.items()}  # type: ignore[union-attr]
        for slots in optimizer.describe_slots()
    ]


def load_slots(
    optimizer: HybridDeviceOptimizer, stored: SlotCopies, *, without: frozenset[str] = frozenset()
) -> list[Receipt]:
    """Loads slots as a load does: requests all destinations, fills them, then attaches them."""
    receipts = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slots = stored[len(receipts)]
            catalogue = {slot: StoredSlot(item.dtype, tuple(item.shape)) for slot, item in slots.items()}
            receipts.append(optimizer.receive_slots(parameter, catalogue))
    for receipt, slots in zip(receipts, stored, strict=True):
        for slot, destination in receipt.tensors.items():
            if slot in slots:
                destination.copy_(slots[slot])  # type: ignore[union-attr]
    for receipt, slots in zip(receipts, stored, strict=True):
        receipt.attach({}, frozenset(receipt.tensors) & slots.keys() - without)
    return receipts


def load_weights(model: nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(model.parameters(), weights, strict=True):
            weight.copy_(value)


def alike(one: SlotCopies, other: SlotCopies) -> bool:
    return [slots.keys() for slots in one] == [slots.keys() for slots in other] and all(
        torch.equal(a[slot], b[slot]) and a[slot].dtype == b[slot].dtype
        for a, b in zip(one, other, strict=True)
        for slot in a
    )


def test_the_hybrid_optimizer_is_a_slot_provider() -> None:
    optimizer = hybrid(model_of())
    assert isinstance(optimizer, SlotProvider)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.describe_shared() == {}
    optimizer.receive_shared({})


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_before_the_first_step_there_are_masters_and_nothing_else(fraction: float) -> None:
    """Describing the state has no effect: no trial step, no random draw, no write to a parameter."""
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(dtype)
        optimizer = hybrid(model, fraction=fraction, master_dtype=torch.float32)
        generator, before = torch.get_rng_state(), values(model)
        versions = [weight._version for weight in model.parameters()]
        described = list(optimizer.describe_slots())
        names = [set(slots.tensors) for slots in described]
        assert names == [{MASTER} if dtype == torch.bfloat16 else set()] * len(before)
        assert all(a is b for a, b in zip((s.parameter for s in described), model.parameters(), strict=True))
        assert not optimizer.state
        load_slots(optimizer, copied_slots(optimizer))
        assert not optimizer.state
        assert torch.equal(torch.get_rng_state(), generator)
        assert equal(values(model), before)
        assert [weight._version for weight in model.parameters()] == versions


def test_options_and_kind_are_described() -> None:
    model = model_of()
    optimizer = hybrid(model)
    optimizer.param_groups[0]["lr"] = 0.5
    for slots in optimizer.describe_slots():
        assert slots.kind == "AdamW"
        assert slots.options["lr"] == 0.5
        assert "params" not in slots.options


@pytest.mark.parametrize("kind", sorted(RULES))
@pytest.mark.parametrize("saved_fraction", FRACTIONS)
@pytest.mark.parametrize("loaded_fraction", FRACTIONS)
def test_training_goes_on_at_another_fraction(
    kind: str, saved_fraction: float, loaded_fraction: float
) -> None:
    model = model_of(torch.bfloat16)
    source = hybrid(model, kind, saved_fraction, master_dtype=torch.float32)
    train(model, source, 0, 3)
    saved, weights = copied_slots(source), values(model)
    for steps_before in (0, 2):
        other = model_of(torch.bfloat16, seed=1)
        target = hybrid(other, kind, loaded_fraction, master_dtype=torch.float32)
        train(other, target, 50, 50 + steps_before)
        load_weights(other, weights)
        load_slots(target, saved)
        assert alike(copied_slots(target), saved)
        train(other, target, 3, 5)
        again = model_of(torch.bfloat16)
        reference = hybrid(again, kind, 0.0, master_dtype=torch.float32)
        train(again, reference, 0, 5)
        assert alike(copied_slots(target), copied_slots(reference))
        assert equal(values(other), values(again))


def test_state_in_use_does_not_change_before_attach() -> None:
    model = model_of(torch.bfloat16)
    optimizer = hybrid(model, master_dtype=torch.float32)
    train(model, optimizer, 0, 2)
    before, weights = copied_slots(optimizer), values(model)
    for parameter in model.parameters():
        stored = {
            "exp_avg": StoredSlot(torch.float32, tuple(parameter.shape)),
            "step": StoredSlot(torch.float32, ()),
        }
        receipt = optimizer.receive_slots(parameter, stored)
        assert set(receipt.tensors) == {"exp_avg", "step", MASTER}
        for destination in receipt.tensors.values():
            destination.fill_(torch.nan)  # type: ignore[union-attr]
    assert alike(copied_slots(optimizer), before)
    assert equal(values(model), weights)


def test_masters_are_loaded_exactly() -> None:
    """They hold more than the parameters do, which a load through the parameter's dtype would lose."""
    for fraction in FRACTIONS:
        model = model_of(torch.bfloat16)
        source = hybrid(model, fraction=fraction, master_dtype=torch.float32)
        train(model, source, 0, 3)
        masters = [slots[MASTER] for slots in copied_slots(source)]
        assert not equal(masters, [weight.float() for weight in values(model)])
        other = model_of(torch.bfloat16, seed=1)
        target = hybrid(other, fraction=fraction, master_dtype=torch.float32)
        load_slots(target, copied_slots(source))
        load_weights(other, values(model))  # also where the model is loaded, or its version changes, later
        target.refresh()
        assert equal([slots[MASTER] for slots in copied_slots(target)], masters)


def test_stale_masters_do_not_undo_a_load_of_the_model_alone() -> None:
    for fraction in FRACTIONS:
        model = model_of(torch.bfloat16)
        optimizer = hybrid(model, "momentum", fraction, master_dtype=torch.float32)
        train(model, optimizer, 0, 3)
        masters = [slots[MASTER] for slots in copied_slots(optimizer)]
        loaded = values(model)
        loaded[0][0] += 1.0
        load_weights(model, loaded)
        optimizer.refresh()
        fresh = [slots[MASTER] for slots in copied_slots(optimizer)]
        assert torch.equal(fresh[0][0], loaded[0][0].float())  # the loaded value
        assert torch.equal(fresh[0][1:], masters[0][1:])  # equal weights keep the exact masters
        assert equal(fresh[1:], masters[1:])


def test_a_master_that_was_not_filled_is_made_from_the_parameter() -> None:
    for fraction in FRACTIONS:
        model = model_of(torch.bfloat16)
        optimizer = hybrid(model, fraction=fraction, master_dtype=torch.float32)
        train(model, optimizer, 0, 3)
        saved = copied_slots(optimizer)
        load_slots(optimizer, saved, without=frozenset((MASTER,)))
        assert equal(
            [slots[MASTER] for slots in copied_slots(optimizer)], [weight.float() for weight in values(model)]
        )


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_parameters_in_float32_have_no_master_and_take_one(fraction: float) -> None:
    """From a plain fp32 run, and from a bf16 run with masters, whose values the parameters take."""
    model = model_of()
    source = hybrid(model, fraction=0.5, master_dtype=torch.float32)
    train(model, source, 0, 2)
    assert not any(MASTER in slots for slots in copied_slots(source))
    other = model_of(seed=1)
    target = hybrid(other, fraction=fraction, master_dtype=torch.float32)
    load_weights(other, values(model))
    load_slots(target, copied_slots(source))
    train(model, source, 2, 3)
    train(other, target, 2, 3)
    assert equal(values(other), values(model))

    narrow = model_of(torch.bfloat16)
    source = hybrid(narrow, master_dtype=torch.float32)
    train(narrow, source, 0, 2)
    load_slots(target, copied_slots(source))
    masters = [slots[MASTER] for slots in copied_slots(source)]
    assert equal(values(other), masters)
    wide = nn.Sequential(*[copy.deepcopy(layer).float() for layer in narrow])
    load_weights(wide, masters)
    reference = plain(wide)
    reference.load_state_dict({**source.state_dict(), "state": {}})
    for weight, slots in zip(wide.parameters(), copied_slots(source), strict=True):
        reference.state[weight] = {slot: item for slot, item in slots.items() if slot != MASTER}
    train(wide, reference, 2, 4)
    train(other, target, 2, 4)
    assert equal(values(other), values(wide))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_state_that_is_not_stored_is_removed(fraction: float) -> None:
    model = model_of()
    optimizer = hybrid(model, fraction=fraction)
    train(model, optimizer, 0, 2)
    saved = copied_slots(optimizer)
    saved[1] = {}
    load_slots(optimizer, saved)
    assert alike(copied_slots(optimizer), saved)
    train(model, optimizer, 2, 3)
    assert float(copied_slots(optimizer)[1]["step"]) == 1
    assert float(copied_slots(optimizer)[0]["step"]) == 3


def test_stepped_tensors_and_groups_keep_their_identity() -> None:
    model = model_of(torch.bfloat16)
    optimizer = hybrid(model, master_dtype=torch.float32)
    train(model, optimizer, 0, 1)
    copies = optimizer._copies
    groups = [stepped.optimizer.param_groups[0] for stepped in copies.values()]
    tensors = [stepped.tensor for stepped in copies.values()]
    stepped = [{id(tensor) for tensor in group["params"]} for group in groups]
    load_slots(optimizer, copied_slots(optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1, 2)
    assert all(stepped.tensor is tensor for stepped, tensor in zip(copies.values(), tensors, strict=True))
    assert all(id(tensor) in ids for tensor, ids in zip(tensors, stepped, strict=True))
    for stepped, group in zip(copies.values(), groups, strict=True):
        assert stepped.optimizer.param_groups[0] is group
        assert stepped.optimizer.state[stepped.tensor] is optimizer.state[stepped.parameter]


def test_a_load_waits_for_copies_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    log = late_copies(monkeypatch)
    model = model_of(torch.bfloat16)
    optimizer = hybrid(model, fraction=1.0, master_dtype=torch.float32)
    train(model, optimizer, 0, 1)
    saved = copied_slots(optimizer)
    log.clear()
    load_slots(optimizer, saved)
    assert log.count("wait up") == len(saved)


def test_state_of_a_narrower_dtype_is_widened_and_a_wider_one_asks_for_a_cast() -> None:
    model = model_of()
    optimizer = hybrid(model)
    weight = model[0].weight
    narrow = optimizer.receive_slots(weight, {"exp_avg": StoredSlot(torch.bfloat16, (7, 5))})
    destination = narrow.tensors["exp_avg"]
    assert isinstance(destination, torch.Tensor)
    assert destination.dtype == torch.bfloat16
    destination.fill_(1.5)
    narrow.attach({}, frozenset(("exp_avg",)))
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full((7, 5), 1.5))
    wide = optimizer.receive_slots(weight, {"exp_avg_sq": StoredSlot(torch.float64, (7, 5))})
    assert wide.tensors["exp_avg_sq"].dtype == torch.float32  # type: ignore[union-attr]


def test_slots_of_a_parameter_in_another_space_have_the_local_shape() -> None:
    """Stored slots of a sharded or fused parameter have the model's shape, and a step for each expert."""
    model = model_of()
    stored = {"exp_avg": StoredSlot(torch.float32, (4, 70, 5)), "step": StoredSlot(torch.float32, (8,))}
    tensors: Mapping[str, Any] = hybrid(model).receive_slots(model[0].weight, stored).tensors
    assert tensors["exp_avg"].shape == (7, 5)
    assert tensors["step"].shape == ()


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\] is no parameter"):
        hybrid(model_of()).receive_slots(torch.zeros(3), {})


@pytest.mark.parametrize("kind", ["adamw", "momentum", "lion"])
@pytest.mark.parametrize("saved_fraction", FRACTIONS)
@pytest.mark.parametrize("loaded_fraction", FRACTIONS)
def test_a_state_dict_is_restored_at_any_fraction(
    kind: str, saved_fraction: float, loaded_fraction: float
) -> None:
    model = model_of(torch.bfloat16)
    source = hybrid(model, kind, saved_fraction, master_dtype=torch.float32)
    train(model, source, 0, 3)
    saved = copy.deepcopy(source.state_dict())
    weights = values(model)
    other = model_of(torch.bfloat16, seed=1)
    target = hybrid(other, kind, loaded_fraction, master_dtype=torch.float32, lr=0.5)
    load_weights(other, weights)
    target.load_state_dict(saved)
    assert target.param_groups[0]["lr"] == 0.02
    train(model, source, 3, 5)
    train(other, target, 3, 5)
    assert equal(values(other), values(model))
    assert alike(copied_slots(target), copied_slots(source))


def test_state_dicts_are_exchanged_with_a_plain_optimizer() -> None:
    reference, model = model_of(), model_of(seed=1)
    one = plain(reference)
    train(reference, one, 0, 2)
    two = hybrid(model)
    load_weights(model, values(reference))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    three_model = model_of(seed=2)
    three = plain(three_model)
    load_weights(three_model, values(reference))
    three.load_state_dict(copy.deepcopy(two.state_dict()))
    for network, optimizer in ((reference, one), (model, two), (three_model, three)):
        train(network, optimizer, 2, 4)
    assert equal(values(model), values(reference))
    assert equal(values(three_model), values(reference))


def test_a_state_dict_of_other_groups_or_shapes_changes_nothing() -> None:
    model = model_of()
    optimizer = hybrid(model)
    train(model, optimizer, 0, 1)
    before = copied_slots(optimizer)
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][2]["exp_avg"] = torch.zeros(2)
    wrong["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match="slot 'exp_avg' of parameter 2"):
        optimizer.load_state_dict(wrong)
    wrong["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"\[5\] parameters, those of the state dict \[4\]"):
        optimizer.load_state_dict(wrong)
    assert alike(copied_slots(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_a_loaded_state_dict_shares_no_option_with_its_source() -> None:
    """A scheduler that fills a learning rate in place changes one optimizer only."""
    source, target = (hybrid(model_of(), lr=torch.tensor(0.1)) for _ in range(2))
    target.load_state_dict(source.state_dict())
    target.param_groups[0]["lr"].fill_(0.5)
    assert float(source.param_groups[0]["lr"]) == pytest.approx(0.1)
