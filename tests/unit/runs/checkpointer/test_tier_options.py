"""The options of a second tier."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

import shardproof as sp
from shardproof.runs.checkpointer.tiers import open_tiers
from shardproof.storage import FsspecStorage, ObjectStorage
from tests.unit.runs.checkpointer.two_tiers import (
    checkpointer,
)


def test_storage_options_are_for_the_tier_in_a_bucket(far: Path) -> None:
    options = {"region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}
    bucket = "s3://bucket/run"
    for near, then in (("memory://run", bucket), (far, bucket), (bucket, far)):
        opened = open_tiers(near, sp.SecondTier(then), options)
        assert sum(isinstance(tier, ObjectStorage) for tier in opened) == 1
    with pytest.raises(sp.StorageError, match="storage_options are for object stores"):
        open_tiers("memory://run", sp.SecondTier(far), options)


def test_a_second_tier_that_is_the_first_under_another_name_is_refused(near: Path, tmp_path: Path) -> None:
    near.mkdir()
    (tmp_path / "link").symlink_to(near)
    with pytest.raises(ValueError, match="the second tier is the first one"):
        checkpointer(near, tmp_path / "link")
    with pytest.raises(ValueError, match="the second tier is the first one"):
        open_tiers("s3://bucket/run", sp.SecondTier("s3a://bucket/run"), {"region": "us-east-1"})


@pytest.mark.parametrize(
    ("second_tier", "message"),
    [
        ("near", "the second tier is the first one"),
        ("near/far", "one tier is inside the other"),
        (".", "one tier is inside the other"),
        ("link/far", "one tier is inside the other"),
    ],
)
def test_a_second_tier_is_apart_from_the_first(
    second_tier: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("near")
    with pytest.raises(ValueError, match=message):
        sp.Checkpointer("near", second_tier=second_tier)
    sp.Checkpointer("near", second_tier="near2")


def test_invalid_options_of_a_second_tier_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth is a positive number"):
        sp.SecondTier("a", bandwidth=0)
    with pytest.raises(ValueError, match="keep of the second tier is a policy"):
        sp.SecondTier("a", keep=3)  # type: ignore[arg-type]


def test_the_text_of_a_second_tier_shows_no_credentials() -> None:
    tier = sp.SecondTier("s3://me:secret@bucket/run?Signature=secret", keep=sp.KeepLatest(2))
    assert repr(tier).startswith("SecondTier(location='s3://***@bucket/run?Signature=***', keep=KeepLatest")
    storage = FsspecStorage(fsspec.filesystem("memory"), "ftp://me:secret@host/run")
    assert "secret" not in repr(sp.SecondTier(storage))
