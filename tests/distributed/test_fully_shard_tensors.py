"""What torch does with the parameters of `fsdp.fully_shard`, whose ranks have different numbers of rows."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.fully_sharded import adamw, flat, loss_of, made, mesh_of, plain, train, words_of
from tests.harness import process_group, rank, run_ranks
from tests.newer_torch import OLDER


def values(outcomes: list) -> list:
    return [outcome.value for outcome in outcomes]


def pairs(model: nn.Module, reference: nn.Module) -> list[tuple[Any, torch.Tensor]]:
    found = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert len({tuple(p.to_local().shape) for p, _ in found}) > 3  # other rows than torch's, some empty
    return found


def same(model: nn.Module, reference: nn.Module) -> None:
    for parameter, expected in pairs(model, reference):
        assert torch.equal(parameter.full_tensor(), expected)


def gathers() -> None:
    from torch.distributed.tensor import Replicate, Shard

    with process_group():
        reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
        same(model, reference)
        for parameter, expected in pairs(model, reference):
            by_last = parameter.redistribute(placements=[Shard(parameter.ndim - 1)])
            assert torch.equal(by_last.redistribute(placements=[Replicate()]).to_local(), expected)
            assert parameter.redistribute(placements=parameter.placements) is parameter
            assert torch.equal((parameter.detach() + 1).full_tensor(), expected + 1)
            assert torch.equal(parameter.detach().T.full_tensor(), expected.T)
            assert parameter.sum().full_tensor().item() == pytest.approx(expected.sum().item(), rel=1e-5)
            assert parameter.norm().item() == pytest.approx(expected.norm().item(), rel=1e-5)
            assert "DTensor" in repr(parameter)
        vector = torch.nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(vector.full_tensor(), torch.nn.utils.parameters_to_vector(reference.parameters()))
        torch.nn.utils.vector_to_parameters(2 * vector, model.parameters())
        for parameter, expected in pairs(model, reference):
            assert torch.equal(parameter.full_tensor(), 2 * expected)
        with pytest.raises(RuntimeError, match="writes to a view.*load_full_state_dict"):
            model.head.weight.detach().view(-1).zero_()
        square = model.head.weight.detach().clone()
        with pytest.raises(RuntimeError, match=r"t_.*changes the shape.*full_tensor"):
            square.t_()
        square.T.contiguous().zero_()  # a copy
        assert torch.equal(square.full_tensor(), model.head.weight.full_tensor())
        mixed = torch._foreach_norm([square, square.bfloat16()])
        assert [norm.dtype for norm in mixed] == [torch.float32, torch.bfloat16]
        with pytest.raises(ValueError, match="must be a DTensor of its mesh"):
            model.head.weight.data = torch.zeros(17, 10)
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        penalty.backward()
        for parameter, expected in pairs(model, reference):
            assert torch.equal(parameter.grad.full_tensor(), 4 * expected)
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        model.head.weight.to_local().sum().backward()
        assert torch.equal(model.head.weight.grad.full_tensor(), gradients[-2] + 1)


def test_gathers_redistributions_and_views() -> None:
    values(run_ranks(2, gathers))


def state_dicts(path: str) -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    import shardproof as sp

    whole = dcp.StateDictOptions(full_state_dict=True)
    with process_group():
        reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
        optimizers = adamw(model.parameters()), adamw(reference.parameters())
        train(model, optimizers[0], 2)
        plain(reference, optimizers[1], 2)
        for name, value in dcp.get_model_state_dict(model, options=whole).items():
            assert torch.equal(value, reference.state_dict()[name])
        found = dcp.get_optimizer_state_dict(model, optimizers[0], options=whole)["state"]
        for name, parameter in reference.named_parameters():
            for slot, value in optimizers[1].state[parameter].items():
                assert torch.equal(found[name][slot], value), (name, slot)

        later = flat(made(blocks=1), mesh_of())
        again = adamw(later.parameters())
        dcp.set_model_state_dict(later, reference.state_dict(), options=whole)
        full = copy.deepcopy(dcp.get_optimizer_state_dict(reference, optimizers[1], options=whole))
        dcp.set_optimizer_state_dict(later, again, full, options=whole)
        assert train(later, again, 1, first=2) == plain(reference, optimizers[1], 1, first=2)
        same(later, reference)
        sp.save(path, {"model": later, "optimizer": again})
        with sp.open(path) as checkpoint:
            for name, parameter in reference.named_parameters():
                stored = checkpoint[f"optimizer.{name}.exp_avg"].read()
                assert torch.equal(stored, optimizers[1].state[parameter]["exp_avg"])

        train(model, optimizers[0], 1, first=2)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = flat(made(blocks=1), mesh_of())
        other.load_state_dict(torch.load(file))  # noqa: TID251
        same(other, reference)


def test_state_dicts_of_torch_are_whole_and_load(tmp_path: Path) -> None:
    values(run_ranks(2, state_dicts, str(tmp_path / "saved")))


def broadcasts() -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with process_group():
        reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
        other, optimizer = adamw(reference.parameters()), adamw(model.parameters())
        plain(reference, other, 2)
        whole = dcp.get_optimizer_state_dict(reference, other)
        is_first = rank() == 0
        dcp.set_model_state_dict(model, reference.state_dict() if is_first else {}, options=options)
        dcp.set_optimizer_state_dict(
            model, optimizer, copy.deepcopy(whole) if is_first else {}, options=options
        )
        same(model, reference)
        for name, parameter in model.named_parameters():
            slot = optimizer.state[parameter]["exp_avg"]
            if not OLDER:  # an older torch makes slots with rows of its own
                assert slot.to_local().shape == parameter.to_local().shape  # no communication in a step
            assert torch.equal(slot.full_tensor(), whole["state"][name]["exp_avg"])
        with torch.device("meta"):
            unmaterialised = flat(made(blocks=1), mesh_of())
        dcp.set_model_state_dict(unmaterialised, reference.state_dict() if is_first else {}, options=options)
        same(unmaterialised, reference)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_state_dict_that_the_first_rank_broadcasts_is_whole(ranks: int) -> None:
    values(run_ranks(ranks, broadcasts))


def torch_checkpoints(path: str) -> None:
    from torch.distributed import checkpoint as dcp

    with process_group():
        reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        whole = {"model": {name: torch.zeros_like(value) for name, value in reference.state_dict().items()}}
        dcp.load(whole, checkpoint_id=path)
        for name, value in reference.state_dict().items():
            assert torch.equal(whole["model"][name], value)
        later = flat(made(blocks=1), mesh_of())
        for parameter in later.parameters():
            parameter.detach().zero_()
        dcp.load({"model": later.state_dict()}, checkpoint_id=path)
        same(later, reference)


def test_checkpoints_of_torch_have_the_rows(tmp_path: Path) -> None:
    values(run_ranks(2, torch_checkpoints, str(tmp_path / "saved")))


def norms() -> None:
    from torch.nn.utils import clip_grad_norm_, get_total_norm

    with process_group():
        reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
        for norm_type in (1.0, 0.0, -1.0, float("-inf")):
            for ours, theirs in pairs(model, reference):
                expected = torch.linalg.vector_norm(theirs + 3, norm_type).item()
                (listed,) = torch._foreach_norm([ours.detach() + 3], norm_type)
                for found in (torch.linalg.vector_norm(ours.detach() + 3, norm_type), listed):
                    assert found.item() == pytest.approx(expected, rel=1e-4)
        for norm_type in (2.0, float("inf")):
            for foreach in (False, True):
                train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1)
                plain(reference, torch.optim.SGD(reference.parameters(), lr=0.0), 1)
                gradients = [[p.grad for p in one.parameters()] for one in (model, reference)]
                found, expected = (get_total_norm(one, norm_type, foreach=foreach) for one in gradients)
                assert found.full_tensor().item() == pytest.approx(expected.item(), rel=1e-5)
                for one in (model, reference):
                    clip_grad_norm_(one.parameters(), 0.01, norm_type, foreach=foreach)
                for ours, theirs in zip(*gradients, strict=True):
                    assert torch.allclose(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-9)


def test_norms_of_torch_count_each_element_once() -> None:
    values(run_ranks(2, norms))


def whole_matrices() -> None:
    """Optimizers that compute with whole matrices, on shards of rows and on plain tensors."""
    with process_group():
        for kind in (torch.optim.Muon, torch.optim.Adafactor):
            options = {"lr": 1e-2}
            reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
            of = lambda one, kind=kind: [  # noqa: E731
                p for p in one.parameters() if p.ndim == 2 or kind is not torch.optim.Muon
            ]
            train(model, kind(of(model), **options), 2)
            plain(reference, kind(of(reference), **options), 2)
            for parameter, expected in pairs(model, reference):
                found = parameter.full_tensor()
                assert (found - expected).norm() <= 2e-3 * expected.norm(), (kind, parameter.shape)


def test_optimizers_of_whole_matrices_step_as_without_sharding() -> None:
    values(run_ranks(2, whole_matrices))


def averages(path: str) -> None:
    from torch.optim.swa_utils import AveragedModel

    import shardproof as sp

    with process_group():
        model = flat(made(blocks=1), mesh_of())
        for copied in (copy.deepcopy, AveragedModel):
            with pytest.raises(TypeError, match="Copy the model first, then call fully_shard on both"):
                copied(model)
        plain_model = made(blocks=1)
        averaged = AveragedModel(plain_model)
        flat(averaged.module, mesh_of())
        flat(plain_model, mesh_of())
        reference, expected = made(blocks=1), AveragedModel(made(blocks=1))
        optimizer, other = adamw(plain_model.parameters()), adamw(reference.parameters())
        for step in range(2):
            train(plain_model, optimizer, 1, first=step)
            plain(reference, other, 1, first=step)
            averaged.update_parameters(plain_model)
            expected.update_parameters(reference)
        same(averaged, expected)
        mine = {name: copy.deepcopy(value) for name, value in plain_model.named_parameters()}
        sp.save(path, {"averaged": averaged, "copies": mine, "detached": plain_model.state_dict()})
    with sp.open(path) as checkpoint:
        for name, value in reference.named_parameters():
            assert torch.equal(checkpoint[f"copies.{name}"].read(), value)
            assert torch.equal(checkpoint[f"detached.{name}"].read(), value)
            assert torch.equal(
                checkpoint[f"averaged.module.{name}"].read(), expected.state_dict()[f"module.{name}"]
            )


def test_averages_and_copies_are_saved_with_their_rows(tmp_path: Path) -> None:
    values(run_ranks(2, averages, str(tmp_path / "saved")))


def scaled() -> None:
    with process_group():
        reference, model = made(blocks=1), flat(made(blocks=1), mesh_of())
        optimizer, other = adamw(model.parameters()), adamw(reference.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in (0, 1):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, words_of(0, rank()))).backward()
            rows = model.head.bias.grad.to_local()
            assert rows.numel() == (17 if rank() else 0)  # the infinity is on one rank
            if step == 0:
                rows[:1] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            if step == 0:
                same(model, reference)
        plain(reference, other, 1)
        for parameter, expected in pairs(model, reference):
            assert torch.allclose(parameter.full_tensor(), expected, atol=1e-6)


def test_a_grad_scaler_skips_the_step_of_all_ranks_for_an_infinity_on_one() -> None:
    values(run_ranks(2, scaled))


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.arange(1.0, 1 + rows * 5).view(rows, 5) / 9) for rows in (3, 4))
        self.bias, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 5), False)

    def penalty(self, factor: torch.Tensor) -> torch.Tensor:
        of_gathered = (self.a @ self.b.t()).square().sum() + (3 * self.bias).sum()
        return (factor * self.a.t()).square().sum() + of_gathered + self.frozen.sum()

    def second_order(self) -> torch.Tensor:
        (gradient,) = torch.autograd.grad((self.b @ self.b.t()).pow(3).sum(), self.b, create_graph=True)
        return gradient.square().sum() * 1e-6


def penalised() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    from shardproof import fsdp

    factor = torch.arange(15.0).view(5, 3)
    with process_group():
        mesh = mesh_of()
        for fused in (False, True):
            reference, model = Penalised(), fsdp.fully_shard(Penalised(), mesh=mesh)
            model.frozen.requires_grad_(True)
            reference.frozen.requires_grad_(True)
            factors = factor, distribute_tensor(factor, mesh, [Replicate()])
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in (reference, model)]
            for step in range(2):
                for one, of, optimizer in zip((reference, model), factors, optimizers, strict=True):
                    optimizer.zero_grad()
                    loss = one.penalty(of) + (one.second_order() if step else 0)
                    loss.backward()
                for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
                    assert parameter.grad.placements == parameter.placements
                    local = parameter.grad.to_local()
                    assert local.shape == parameter.to_local().shape
                    assert local.is_contiguous()
                    assert torch.allclose(parameter.grad.full_tensor(), expected.grad, rtol=1e-5)
                gradients = [parameter.grad for parameter in reference.parameters()]
                norm = torch.nn.utils.get_total_norm(gradients).item()
                found = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
                assert found.full_tensor().item() == pytest.approx(norm, rel=1e-5)
                assert fsdp.clip_grad_norm_(model, float("inf")).item() == pytest.approx(norm, rel=1e-5)
                for optimizer in optimizers:
                    optimizer.step()
            for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(parameter.full_tensor(), expected, rtol=1e-4)


def test_gradients_of_penalties_have_the_rows_of_their_parameters() -> None:
    values(run_ranks(2, penalised))


def shared_gradient() -> None:
    from shardproof import fsdp

    with process_group():
        model = nn.Linear(5, 3, device="meta")
        model.other = nn.Linear(5, 3, bias=False, device="meta")
        fsdp.materialize(fsdp.fully_shard(model, mesh=mesh_of()), "cpu")
        for create_graph in (False, True):
            model.zero_grad()
            joined = (model.weight + model.other.weight).sin().sum() + (model.bias * 2).sum()
            joined.backward(create_graph=create_graph)
            for parameter in model.parameters():
                assert parameter.grad.placements == parameter.placements


def test_one_gradient_of_two_parameters_has_the_rows_of_both() -> None:
    values(run_ranks(2, shared_gradient))


def views() -> None:
    from shardproof import fsdp

    with process_group():
        reference, model = Penalised(), fsdp.fully_shard(Penalised(), mesh=mesh_of())
        for of in (
            lambda m: m.b[:3] + m.a,
            lambda m: m.a.view(5, 3).view(3, 5) + m.a,
            lambda m: torch.cat([m.b[1:], m.a]),
            lambda m: m.a[:2] * m.frozen,
        ):
            model.zero_grad()
            reference.zero_grad()
            found, expected = of(model), of(reference)
            assert torch.equal(found.full_tensor(), expected)
            found.square().sum().backward()
            expected.square().sum().backward()
            for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert (parameter.grad is None) == (other.grad is None)
                if other.grad is not None:
                    assert torch.allclose(parameter.grad.full_tensor(), other.grad)


def test_a_view_and_a_parameter_are_operands_in_any_order() -> None:
    values(run_ranks(2, views))


def compiled_steps() -> None:
    from shardproof import fsdp

    with process_group():
        reference, model = Penalised(), fsdp.fully_shard(Penalised(), mesh=mesh_of())
        steps = []
        for one in (reference, model):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=True)
            steps.append(optimizer.step)
            for step in range(3):
                optimizer.zero_grad()
                (one.a.square().sum() + one.b.sum() + one.bias.sum()).backward()
                if one is model and step == 1:  # the first step makes the slots
                    steps[-1] = torch.compile(optimizer.step, backend="aot_eager")
                steps[-1]()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter.full_tensor(), expected)
        optimizers = [torch.optim.Adafactor([model.a]) for _ in range(2)]
        with pytest.raises(Exception, match=r"cannot gather.*Call optimizer.step\(\) without torch.compile"):
            torch.compile(optimizers[0].step, backend="eager")()
        before = model.a.full_tensor().clone()
        optimizers[1].step()
        assert not torch.equal(model.a.full_tensor(), before)


def test_a_compiled_step_changes_the_rows_or_names_the_remedy() -> None:
    values(run_ranks(2, compiled_steps, timeout=200))
