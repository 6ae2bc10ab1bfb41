"""Errors of shardproof are also those that a framework raises."""

from __future__ import annotations

import copy
import resource
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from shardproof.errors import (
    AlreadyCommittedError,
    KeyMismatchError,
    RankFailure,
    ShardproofError,
    StructureError,
)
from shardproof.frameworks import dcp
from shardproof.frameworks.shared.replacements import raised_as

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class PeerError(Exception):
    """The error of a framework."""


def test_an_error_has_the_classes_of_both_sides_and_stays_the_same() -> None:
    error = KeyMismatchError("no 'w'", missing=["w"])
    with pytest.raises(PeerError) as caught, raised_as(PeerError), raised_as(PeerError):
        raise error
    assert caught.value is error and isinstance(error, (KeyMismatchError, CheckpointException))
    assert str(error) == "no 'w'" and error.details == {"missing": ["w"]}
    assert f"{type(error).__module__}.{type(error).__qualname__}" == "shardproof.errors.KeyMismatchError"


def test_a_copy_for_another_process_has_the_plain_class() -> None:
    error = StructureError("shapes differ", key="w")
    with pytest.raises(PeerError), raised_as(PeerError):
        raise error
    for other in (copy.copy(error), ShardproofError.from_wire(error.to_wire())):
        assert type(other) is StructureError and str(other) == "shapes differ"


def test_failures_are_those_of_the_ranks_that_failed() -> None:
    causes = {"1": "ValueError: bad", "3": "OSError: full"}
    with pytest.raises(CheckpointException) as caught, raised_as():
        raise RankFailure("2 ranks failed", phase="write", causes=causes)
    found = {rank: str(error) for rank, (error, _) in caught.value.failures.items()}
    assert found == {1: "ValueError: bad", 3: "OSError: full"}


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="mine") as caught, raised_as(PeerError):
        raise ValueError("mine")
    assert type(caught.value) is ValueError


def test_calls_of_dcp_raise_what_torch_raises(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    writer = dcp.ShardproofWriter(tmp_path, overwrite=False)
    calls: list[tuple[Any, type[ShardproofError]]] = [
        (lambda: dcp.save({}, storage_writer=writer), AlreadyCommittedError),
        (lambda: dcp.async_save({}, storage_writer=writer), AlreadyCommittedError),
        (lambda: dcp.load({"x": 0}, checkpoint_id=tmp_path), KeyMismatchError),
    ]
    for call, kind in calls:
        with pytest.raises(dcp.CheckpointException) as caught:
            call()
        assert isinstance(caught.value, kind) and caught.value.failures[0][0] is caught.value


def test_the_future_of_dcp_raises_what_torch_raises(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        future: Future[Any] = dcp.async_save({"w": torch.ones(4096)}, checkpoint_id=tmp_path / "step")
        error = future.exception()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(error, CheckpointException) and isinstance(error, ShardproofError)
    with pytest.raises(CheckpointException, match="File too large"):
        future.result()
