"""A rank that sees other files than rank 0 (a stale cache, a missing mount) is an error, not damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shardproof as sp
from shardproof.engine.format import Manifest
from shardproof.engine.loading import checkpoint as opening
from shardproof.storage import LocalStorage
from tests.harness import rank, rendezvous, run_ranks


class _Elsewhere(LocalStorage):
    """A folder beside step 2 that has the location of step 2."""

    @property
    def location(self) -> str:
        return str(Path(super().location).with_name("step-00000002"))


def restore_with_another_view(root: str, view: str) -> dict[str, Any]:
    """Rank 1 sees no manifest, no index or no shard file of step 2, or the manifest of another attempt."""
    meetings = rendezvous(deadline=10)
    checkpointer = sp.Checkpointer(root, rendezvous=meetings)
    if rank() == 1 and view == "attempt":
        read = opening.read_manifest

        def other(storage: Any) -> Manifest:
            return msgspec.structs.replace(read(storage), attempt="another")

        opening.read_manifest = other  # type: ignore[assignment]
    elif rank() == 1:
        hidden = Path(root, f"hidden-{view}")
        shutil.copytree(Path(root, "step-00000002"), hidden)
        for file in [*hidden.glob(f"{view}*"), *hidden.glob(f"*/{view}*")]:
            file.unlink()
        within = LocalStorage.within

        def elsewhere(storage: LocalStorage, prefix: str) -> LocalStorage:
            return _Elsewhere(hidden) if prefix == "step-00000002" else within(storage, prefix)

        LocalStorage.within = elsewhere  # type: ignore[method-assign]
    state = {"w": torch.zeros(1000), "own": sp.PerRank(torch.zeros(1000))}
    try:
        checkpointer.restore(state)
    except sp.ShardproofError as error:
        return {
            "error": error.to_wire(),
            "passed over": checkpointer.passed_over,
            "damaged": {item.step for item in checkpointer.passed_over if item.damaged},
        }
    return {"passed over": checkpointer.passed_over}


def save(root: str) -> None:
    checkpointer = sp.Checkpointer(root, rendezvous=rendezvous(deadline=10))
    for step in (1, 2):
        state = {"w": torch.ones(1000) * step, "own": sp.PerRank(torch.ones(1000) * step)}
        checkpointer.save(step, state).result()


@pytest.mark.parametrize(
    ("view", "kind", "text"),
    [
        ("attempt", "StorageError", "ranks see different checkpoints"),
        ("manifest", "NotCommittedError", "Rank 0 sees it"),
        ("index", "FormatError", "Rank 0 sees it"),
        ("00001", "StorageError", "Rank 0 sees it"),
    ],
)
def test_a_step_that_one_rank_sees_differently_is_not_passed_over(
    tmp_path: Path, view: str, kind: str, text: str
) -> None:
    run_ranks(2, save, str(tmp_path))
    for outcome in run_ranks(2, restore_with_another_view, str(tmp_path), view):
        found = outcome.value
        assert found["passed over"] == ()
        assert found["error"]["type"] == kind
        assert text in found["error"]["message"]
        assert found["damaged"] == set(), "a save of step 2 must not replace it unasked"
