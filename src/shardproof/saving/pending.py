"""A save that was begun: what came of it, and how long it held the caller."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future

from shardproof.errors import SaveSkipped, ShardproofError, StorageError
from shardproof.reentrance import refuse_inside
from shardproof.saving.background import Progress, wait_while_moving
from shardproof.saving.result import SaveResult

__all__ = ["PendingSave"]


class PendingSave:
    """A save that goes on while training does.

    >>> import shardproof as sp, tempfile, torch
    >>> pending = sp.Checkpointer(tempfile.mkdtemp()).save(7, {"w": torch.ones(2)})
    >>> pending.result().step, pending.done(), pending.skipped
    (7, True, False)
    """

    def __init__(
        self,
        step: int | None,
        future: Future[SaveResult] | None,
        progress: Progress | None = None,
        patience: float = 0.0,
    ) -> None:
        self.step = step
        """The step that is saved."""
        self.blocked = 0.0
        """Seconds for which the call that began it held the caller."""
        self._future = future
        self._progress = progress or Progress()
        self._patience = patience
        self._told = False
        self._process = os.getpid()

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved, because another save was still under way."""
        return self._future is None

    def done(self) -> bool:
        """Whether it is over: committed, failed or skipped."""
        return self._future is None or self._future.done()

    def result(self, timeout: float | None = None) -> SaveResult:
        """The committed checkpoint, once it is durable.

        Args:
            timeout: seconds to wait at most; the save goes on in any case. None: as long as it moves, for a
                save whose ranks fall silent fails by itself.

        Raises:
            TimeoutError: it is still under way.
            ReentrantCallError: a signal handler called it that interrupted a save or a load.
            SaveSkipped: there is none.
            RuntimeError: it was begun by the process that this one was forked from.
            StorageError: it does not move any more, and cannot be ended: the storage hangs. It may be
                committed, or yet be once the storage answers.
            ShardproofError: the save failed on some rank. Nothing was committed, unless the text says so, or
                the coordinator fell silent after it had published.
        """
        refuse_inside("result")
        return self.outcome(timeout)

    def outcome(self, timeout: float | None = None) -> SaveResult:
        """What `result` returns, also for a save that waits for itself."""
        if self._future is None:
            raise SaveSkipped(
                f"step {self.step} was not saved: the save before it was still under way, and when_busy is "
                "'skip'"
            )
        if self._process != os.getpid():
            raise RuntimeError(
                f"the save of step {self.step} began in another process, which this one was forked from: "
                "ask there"
            )
        if timeout is None:
            self.settle()
        try:
            return self._future.result(timeout)
        except ShardproofError:
            self._told = True
            raise

    def settle(self, tick: Callable[[], None] | None = None) -> None:
        """Waits until it is over, whatever came of it, as long as it moves.

        Args:
            tick: called whenever it moved.

        Raises:
            StorageError: it does not move any more.
        """
        if self._future is not None and not wait_while_moving(
            self._future, self._progress, self._patience, tick
        ):
            raise StorageError(
                f"the save of step {self.step} has made no progress for {self._patience:.0f} s and cannot be "
                "ended: the storage hangs. It may be committed, or yet be once the storage answers. Start "
                "the process again; restore looks at what is there"
            )

    def tell(self) -> None:
        """The caller learns of a failure by another way: nobody else needs to be told."""
        self._told = True

    def take_failure(self) -> ShardproofError | None:
        """Why the save failed, the first time that anybody asks; None if it did not, or not yet."""
        if self._told or self._future is None or not self._future.done():
            return None
        error = self._future.exception()
        self._told = True
        assert error is None or isinstance(error, ShardproofError)
        return error

    def __repr__(self) -> str:
        if self._future is None:
            state = "skipped"
        elif not self._future.done():
            state = "under way"
        else:
            state = "failed" if self._future.exception() else "committed"
        return f"PendingSave(step={self.step}, {state})"
