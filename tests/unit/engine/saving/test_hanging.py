"""Messages about a save that hangs. They say that it may be committed, now or later."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import pytest

from shardproof.engine.saving import PendingSave, SaveResult
from shardproof.engine.saving.background import Progress, unfinished
from shardproof.errors import StorageError


def test_the_error_of_a_hanging_save_says_that_it_may_be_committed() -> None:
    with pytest.raises(StorageError, match="storage hangs. It may be committed, now or when"):
        PendingSave(3, Future[SaveResult]()).result()


def test_the_log_at_exit_says_where_to_look(caplog: pytest.LogCaptureFixture) -> None:
    saves, future = type(unfinished)(), Future[SaveResult]()
    saves.add(future, Progress(), 0.0, "save runs/gpt/step-00000003")
    with caplog.at_level(logging.ERROR):
        saves.wait()
    future.cancel()
    assert caplog.messages == [
        "save runs/gpt/step-00000003: given up at exit, after 0 s without progress. Run `shardproof ls` to "
        "see whether it is committed"
    ]
