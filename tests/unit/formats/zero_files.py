"""Files as DeepSpeed writes them, made with torch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch


class FragmentAddress:
    """As ``deepspeed.utils.tensor_fragment.fragment_address``."""

    def __init__(self, start: int, numel: int) -> None:
        self.numel = numel
        self.start = start


STATES = ("fp32", "exp_avg", "exp_avg_sq")
Shapes = Sequence[Mapping[str, tuple[int, ...]]]


def values(shapes: Shapes) -> dict[str, dict[str, torch.Tensor]]:
    """By state and parameter, a tensor in which all elements differ."""
    made: dict[str, dict[str, torch.Tensor]] = {state: {} for state in STATES}
    at = 1
    for group in shapes:
        for name, shape in group.items():
            for state in STATES:
                made[state][name] = torch.arange(at, at + prod(shape), dtype=torch.float32).reshape(shape)
                at += prod(shape)
    return made


def write_zero(
    folder: Path, stage: int, world_size: int, shapes: Shapes, *, mapped: bool = True
) -> dict[str, dict[str, torch.Tensor]]:
    """Writes a checkpoint with ZeRO; a frozen parameter, a buffer and a tied name are in it.

    Args:
        folder: the run folder.
        stage: 1, 2 or 3.
        world_size: data-parallel ranks.
        shapes: of the parameters of each group.
        mapped: False leaves the slice mappings out.

    Returns:
        The values by state and parameter, those of the whole fp32 model among them.
    """
    made = values(shapes)
    tag = folder / "step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step7")
    frozen, buffer = torch.arange(-5.0, 0).reshape(5, 1), torch.tensor([9, 8])
    count = -(-5 // world_size)
    for rank in range(world_size) if stage == 3 else [0]:
        parts = torch.cat([frozen.reshape(-1), torch.full((count * world_size - 5,), 1e9)]).chunk(world_size)
        module = {name: torch.empty(0) if stage == 3 else t.bfloat16() for name, t in made["fp32"].items()}
        states: dict[str, Any] = {
            "module": {**module, "frozen": torch.empty(0) if stage == 3 else frozen, "buffer": buffer},
            "buffer_names": ["buffer"],
            "optimizer": None,
            "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in shapes],
            "frozen_param_shapes": {"frozen": frozen.shape},
            "frozen_param_fragments": {"frozen": parts[rank].clone() if stage == 3 else frozen},
            "shared_params": {"tied": next(iter(made["fp32"]))},
            "global_steps": 7,
            "dp_world_size": world_size,
            "ds_config": {"zero_optimization": {"stage": stage}},
            "client": {"epoch": 3, "generator": (torch.arange(4), 1)},
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(states, tag / f"{name}_model_states.pt")
    for rank in range(world_size):
        part = _cut(made, rank, world_size, shapes) if stage == 3 else _joined(made, rank, world_size, shapes)
        optimizer = part.pop("optimizer")
        optimizer |= {"partition_count": world_size if stage == 3 else [world_size] * len(shapes)}
        if stage < 3 and not mapped:
            del optimizer["param_slice_mappings"]
        torch.save(
            {"optimizer_state_dict": {**optimizer, "zero_stage": stage, "clip_grad": 1.0}},
            tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    made["fp32"] |= {"frozen": frozen, "buffer": buffer, "tied": next(iter(made["fp32"].values()))}
    return made


def _base(flats: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    moments = {
        row: {"step": torch.tensor(7.0), **{key: flat[key] for key in STATES[1:]}}
        for row, flat in enumerate(flats)
    }
    return {"state": moments, "param_groups": [{"lr": 0.1, "params": [row]} for row in moments]}


def _joined(made: Mapping[str, Any], rank: int, world_size: int, shapes: Shapes) -> dict[str, Any]:
    """The partition of a rank at stages 1 and 2. Padding is 1e9."""
    flats, mappings, paddings = [], [], []
    for group in shapes:
        numel = sum(prod(shape) for shape in group.values())
        part = -(-numel // (2 * world_size)) * 2
        flat = {}
        for state in STATES:
            whole = torch.cat(
                [made[state][name].reshape(-1) for name in group]
                + [torch.full((part * world_size - numel,), 1e9)]
            )
            flat[state] = whole[rank * part : (rank + 1) * part].clone()
        mapping, begin = {}, 0
        for name, shape in group.items():
            low, high = max(begin, rank * part), min(begin + prod(shape), (rank + 1) * part)
            if low < high:
                mapping[name] = FragmentAddress(low - rank * part, high - low)
            begin += prod(shape)
        paddings.append(min(part, max(0, (rank + 1) * part - numel)))
        flat["fp32"] = flat["fp32"][: part - paddings[-1]]
        flats.append(flat)
        mappings.append(mapping)
    return {
        "optimizer": {
            "base_optimizer_state": _base(flats),
            "single_partition_of_fp32_groups": [flat["fp32"] for flat in flats],
            "group_paddings": paddings,
            "param_slice_mappings": mappings,
        }
    }


def _cut(made: Mapping[str, Any], rank: int, world_size: int, shapes: Shapes) -> dict[str, Any]:
    """The parts of a rank at stage 3. Padding is 1e9."""
    flats = []
    for group in shapes:
        flat = {}
        for state in STATES:
            parts = []
            for name, shape in group.items():
                count = -(-prod(shape) // world_size)
                padding = torch.full((count * world_size - prod(shape),), 1e9)
                whole = torch.cat([made[state][name].reshape(-1), padding])
                parts.append(whole[rank * count : (rank + 1) * count])
            flat[state] = torch.cat(parts)
        flats.append(flat)
    weights = [flat["fp32"] for flat in flats]
    for weight in weights:
        weight.ds_id = "0_4"  # type: ignore[attr-defined]
    return {"optimizer": {"optimizer_state_dict": _base(flats), "fp32_flat_groups": weights}}


def write_universal(folder: Path, stage: int, shapes: Shapes) -> dict[str, dict[str, torch.Tensor]]:
    """Writes a universal checkpoint of 2 ranks, as `write_zero` writes the checkpoint that it is made of."""
    made = write_zero(folder, stage, 2, shapes)
    tag = folder / "step7"
    (folder / "latest").rename(folder / "latest_universal")
    states = torch.load(tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)  # noqa: TID251
    optimizer = states["optimizer_state_dict"]
    base = optimizer.pop("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    optimizer["param_groups"] = base["param_groups"]
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    for state, tensors in made.items():
        for name, tensor in tensors.items():
            if (stage == 3 and name in ("frozen", "buffer")) or name == "tied":
                continue  # ds_to_universal.py leaves them out
            (tag / "zero" / name).mkdir(parents=True, exist_ok=True)
            whole = tensor.reshape(-1) if stage == 3 else {"cat_dim": 0, "param": tensor}
            torch.save(whole, tag / "zero" / name / f"{state}.pt")
            if stage < 3 and name in made["exp_avg"]:
                torch.save(torch.tensor(7.0), tag / "zero" / name / "step.pt")
    torch.save(optimizer, tag / "zero" / "optimizer_state.pt")
    return made
