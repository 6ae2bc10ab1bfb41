"""Checkpoints of other projects fill DTensors on ranks of any number, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardproof as sp
from tests.harness import process_group, rank, rendezvous, run_ranks, world_size
from tests.unit.formats.peers import PEERS, Golden, bits

NAMES = sorted(
    path.name.removesuffix(".tar.gz") for path in PEERS.glob("*.tar.gz") if "evil" not in path.name
)


_WRONG = {"zarr_mc11_handmade_w2": {"row"}}
"""Keys whose expected bytes are not the stored ones. See
`tests/unit/formats/megatron/test_megatron_zarr.py`."""


def _path(folder: Path, name: str) -> Path:
    """The checkpoint: its folder, or its file if it is one file."""
    found = list((folder / name / "ckpt").iterdir())
    is_file = len(found) == 1 and found[0].is_file()
    return found[0] if is_file else folder / name / "ckpt"


def _load_all(folder: str) -> dict[str, list[str]]:
    """Loads each golden checkpoint into DTensors, and names the keys whose local parts differ."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    wrong: dict[str, list[str]] = {}
    with process_group():
        mesh = init_device_mesh("cpu", (world_size(),))
        for name in NAMES:
            golden = Golden(name, Path(folder) / f"rank-{rank()}")
            expected, target = {}, {}
            path = _path(Path(folder), name)
            with sp.open(path) as checkpoint:
                keys = sorted(set(checkpoint) & set(golden.kinds) - _WRONG.get(name, set()))
                whole_of = {key: golden.tensor(key) for key in keys}
                if not keys:  # the expectations have other keys; unit tests compare these reads with them
                    items = {key: checkpoint[key] for key in sorted(checkpoint)}
                    whole_of = {
                        k: item.read() for k, item in items.items() if isinstance(item, sp.StoredTensor)
                    }
            assert whole_of, name
            for number, (key, whole) in enumerate(whole_of.items()):
                is_cut = whole.dim() and "float4" not in str(whole.dtype)
                placement = Shard(number % whole.dim()) if is_cut else Replicate()  # torch cuts no float4
                expected[key] = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                blank = torch.empty_like(whole)
                target[key] = distribute_tensor(blank, mesh, [placement], src_data_rank=None)
            report = sp.load(
                path,
                target,
                strict=False,
                rendezvous=rendezvous(deadline=60.0),
            )
            assert not report.missing, (name, report.missing)
            wrong[name] = [
                key for key in expected if bits(target[key].to_local()) != bits(expected[key].to_local())
            ]
    return wrong


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_golden_checkpoints_fill_dtensors(ranks: int, tmp_path: Path) -> None:
    for name in NAMES:
        Golden(name, tmp_path)
    for outcome in run_ranks(ranks, _load_all, str(tmp_path), timeout=240):
        assert outcome.value == {name: [] for name in NAMES}
