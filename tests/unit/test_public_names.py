"""The names of `shardproof`: where they come from, what loads them, and which old ones still work."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import shardproof as sp


def test_the_old_name_of_local_shards_works_and_warns_where_it_is_used() -> None:
    with pytest.warns(DeprecationWarning, match=r"shardproof\.LocalShards") as caught:
        old = sp.ShardedTensor
    assert old is sp.LocalShards
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match=r"shardproof\.LocalShards") as caught:
        from shardproof import ShardedTensor
    assert ShardedTensor is sp.LocalShards
    assert {warning.filename for warning in caught} == {__file__}


def test_the_new_name_does_not_warn_and_the_old_one_is_not_listed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sp.LocalShards.__name__ == "LocalShards"
    assert "LocalShards" in sp.__all__ and "ShardedTensor" not in {*sp.__all__, *dir(sp)}


def test_a_checkpoint_does_not_hold_the_name_of_the_class(tmp_path: Path) -> None:
    """What is stored depends on the values, so a class may be renamed."""
    sp.save(tmp_path / "c", {"w": sp.LocalShards((4,), [(torch.ones(4), (0,))])})
    stored = b"".join(path.read_bytes() for path in sorted((tmp_path / "c").rglob("*")) if path.is_file())
    assert b'"w"' in stored
    assert b"LocalShards" not in stored and b"ShardedTensor" not in stored
