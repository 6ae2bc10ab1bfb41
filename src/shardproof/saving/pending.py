"""The handle of a save in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from shardproof.errors import SaveSkipped, ShardproofError, StorageError
from shardproof.reentrance import refuse_inside
from shardproof.saving.background import Progress, log_callback_error, wait_while_moving
from shardproof.saving.messages import SaveResult

__all__ = ["PendingSave", "wait_for_end"]


def wait_for_end(future: Future[SaveResult], step: int | None, timeout: float | None) -> None:
    """Waits until a save is over, with any outcome.

    Raises:
        TimeoutError: the save has not ended after `timeout` seconds. None: no bound.
    """
    if not wait([future], timeout).done:
        which = "the save" if step is None else f"the save of step {step}"
        raise TimeoutError(f"{which} has not ended after {timeout:g} s")


class PendingSave:
    """A save that continues in the background.

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
        """The step of the save."""
        self.blocked = 0.0
        """Seconds that the call of `save` took."""
        self._future = future
        self._progress = progress or Progress()
        self._patience = patience
        self._reported = False
        self._process = os.getpid()
        self._until_uploaded: Callable[[float | None], None] | None = None
        self._error_context: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def skipped(self) -> bool:
        """True if nothing was saved, because the previous save had not ended."""
        return self._future is None

    def done(self) -> bool:
        """True if the save is over: committed, failed or skipped."""
        return self._future is None or self._future.done()

    def result(self, timeout: float | None = None) -> SaveResult:
        """Waits for the commit.

        Args:
            timeout: seconds to wait at most; the save continues in any case. None: until the save is over
                or makes no progress.

        Returns:
            The committed, durable checkpoint.

        Raises:
            TimeoutError: the save has not ended.
            ReentrantCallError: a signal handler that interrupted a save or a load called it.
            SaveSkipped: the save was skipped.
            RuntimeError: the parent of this forked process began the save.
            StorageError: the save makes no progress, because the storage hangs. It may be committed, now or
                when the storage answers.
            ShardproofError: the save failed on a rank. Nothing was committed, with two exceptions: the
                message says that it was, or the coordinator fell silent after the commit.
        """
        refuse_inside("result")
        return self.outcome(timeout)

    def durable(self, timeout: float | None = None) -> SaveResult:
        """Waits until the step is whole on the last tier (``Checkpointer(second_tier=)``).

        Without further tiers, it does the same as `result`. An upload may take longer than the time between
        two saves, so call it where the program needs the upload: at its end, or before it releases a node.

        Args:
            timeout: seconds to wait at most; save and upload continue in any case. None: until they are over
                or make no progress.

        Returns:
            The result of the commit on the first tier.

        Raises:
            TimeoutError: the upload has not ended.
            SaveSkipped: the step is not uploaded, because newer steps replaced it or the first tier has
                damaged bytes of it. The text gives the reason.
            StorageError: the storage failed or hangs.
            ShardproofError: see `result`; or the upload failed on a rank. The step is committed on the first
                tier, and the next save tries the upload again.

        Example:
            >>> import shardproof as sp, tempfile, torch
            >>> near, far = tempfile.mkdtemp(), tempfile.mkdtemp()
            >>> pending = sp.Checkpointer(near, second_tier=far).save(7, {"w": torch.ones(2)})
            >>> pending.durable(timeout=60).step, sp.Checkpointer(far).steps()
            (7, [7])
        """
        ends = None if timeout is None else time.monotonic() + timeout
        result = self.result(timeout)
        if self._until_uploaded is not None:
            self._until_uploaded(None if ends is None else max(0.0, ends - time.monotonic()))
        return result

    def set_upload_wait(self, wait: Callable[[float | None], None]) -> None:
        """Sets the function that `durable` calls after the commit, with the seconds that are left."""
        self._until_uploaded = wait

    def set_error_context(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        """Sets the context that errors of this save are raised in. An adapter may add classes to them."""
        self._error_context = context

    def outcome(self, timeout: float | None = None) -> SaveResult:
        """`result` without the check for reentrant calls; a synchronous save calls it."""
        with self._error_context():
            return self._outcome(timeout)

    def _outcome(self, timeout: float | None) -> SaveResult:
        if self._future is None:
            raise SaveSkipped(
                f"step {self.step} was not saved: the previous save had not ended, and when_busy is 'skip'"
            )
        if self._process != os.getpid():
            raise RuntimeError(
                f"the save of step {self.step} began in the parent of this forked process: call "
                "result() there"
            )
        if timeout is None:
            self.wait_for_end()
        wait_for_end(self._future, self.step, timeout)
        try:
            return self._future.result()
        except ShardproofError:
            self._reported = True
            raise

    def future(self) -> Future[SaveResult]:
        """This save as a future of `concurrent.futures`, for callbacks and waits for several.

        It cannot be cancelled. `Future.result` and `Future.exception` wait as `result` does. If no caller
        asks for a failure, the next save raises it.

        Example:
            >>> import shardproof as sp, tempfile, torch
            >>> future = sp.Checkpointer(tempfile.mkdtemp()).save(7, {"w": torch.ones(2)}).future()
            >>> future.result().step, future.cancel()
            (7, False)
        """
        return _SaveFuture(self, self._future)

    def wait_for_end(self, tick: Callable[[], None] | None = None) -> None:
        """Waits until the save is over, with any outcome, while it makes progress.

        Args:
            tick: called after each progress.

        Raises:
            StorageError: the save makes no progress.
        """
        if self._future is not None and not wait_while_moving(
            self._future, self._progress, self._patience, tick
        ):
            raise StorageError(
                f"the save of step {self.step} has made no progress for {self._patience:.0f} s and cannot be "
                "ended: the storage hangs. It may be committed, now or when the storage answers. Restart the "
                "process; restore finds the newest committed step"
            )

    def mark_reported(self) -> None:
        """Marks a failure as reported, because the caller receives it directly."""
        self._reported = True

    def take_failure(self) -> ShardproofError | None:
        """Returns the error of the save once; None if it has none, or it was returned before."""
        if self._reported or self._future is None or not self._future.done():
            return None
        error = self._future.exception()
        self._reported = True
        assert error is None or isinstance(error, ShardproofError)
        return error

    def __repr__(self) -> str:
        if self._future is None:
            state = "skipped"
        elif not self._future.done():
            state = "saving"
        else:
            state = "failed" if self._future.exception() else "committed"
        return f"PendingSave(step={self.step}, {state})"


class _SaveFuture(Future[SaveResult]):
    """A future that asks a pending save for its outcome, so that an error counts as reported.

    The state of the base class is only used by `done` and the callbacks. It has neither result nor error.
    `ended` is done when the save is over; None if it was skipped.
    """

    def __init__(self, pending: PendingSave, ended: Future[SaveResult] | None) -> None:
        super().__init__()
        self._pending = pending
        self.set_running_or_notify_cancel()
        if ended is None:
            self._end(None)
        else:
            ended.add_done_callback(self._end)

    def result(self, timeout: float | None = None) -> SaveResult:
        """See `PendingSave.result`."""
        return self._pending.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the save, or None once it is committed. See `PendingSave.result`."""
        try:
            self._pending.result(timeout)
        except ShardproofError as error:
            return error
        return None

    def add_done_callback(self, fn: Callable[[Future[SaveResult]], object]) -> None:
        """As in the base class. In the save thread, SystemExit of a callback is only logged, too.

        Otherwise the later callbacks would not be called.
        """
        super().add_done_callback(fn if self.done() else partial(_call_back, fn))

    def _end(self, _ended: Future[SaveResult] | None) -> None:
        self.set_result(None)  # type: ignore[arg-type]


def _call_back(fn: Callable[[Future[SaveResult]], object], future: Future[SaveResult]) -> None:
    try:
        fn(future)
    except BaseException as error:
        log_callback_error(error)
