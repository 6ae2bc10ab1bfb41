"""A save in the background: its threads, its progress, and its handle. The process waits for it at exit.

Note "The end of the interpreter": these threads are daemons, so a thread that hangs in a dead file system
cannot keep the process alive. An `atexit` function waits for their work before the interpreter shuts down, or
a finalizer: CPython 3.11 skips `atexit` in processes that `multiprocessing` makes by fork or a fork server.
Executors then accept no work, and from CPython 3.12 on no thread can be started. So these threads are started
at the first save and need only a queue, the links of a rendezvous start before the caller continues, and
`map_requests` and `ObjectSink` work in the calling thread. A child made by fork waits for no earlier save.

Note "Frames": an error refers to the frames that it passed, and these to their variables. The future of a
save keeps its error, with its causes. So none of them has a traceback there, and a caller raises a copy of
the error. Otherwise the save, and all that it refers to, would live until a garbage collection. A note of
each error lists the calls that its traceback had.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from shardproof._utils import forks
from shardproof.engine.saving.messages import SaveResult
from shardproof.errors import SaveSkipped, ShardproofError, StorageError
from shardproof.reentrance import refuse_inside

T = TypeVar("T")

_log = logging.getLogger("shardproof")
_POLL_SECONDS = 0.2
"""Seconds between two checks for progress."""
_CALLS = "Calls of the save thread that led to this error:\n"
_MOST_CALLS = 16
"""Calls that a note lists, the last ones."""


class Workers:
    """`count` threads that run tasks from one queue, in the order in which they were submitted.

    >>> workers = Workers("shardproof-doctest", 1)
    >>> workers.submit(lambda: 6 * 7).result()
    42
    """

    def __init__(self, name: str, count: int) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for number in range(count):
            title = name if count == 1 else f"{name}-{number}"
            threading.Thread(target=_run, args=(self._tasks,), name=title, daemon=True).start()
        weakref.finalize(self, _stop, self._tasks, count)

    def submit(self, work: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Runs `work` when a thread is free. Its result or error becomes that of the future."""
        result: Future[T] = Future() if future is None else future
        self._tasks.put(lambda: _fulfil(result, work))
        return result


def _run(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise its references would stay until the next task


def _stop(tasks: SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
    except BaseException as error:  # of a callback; `Future` lets SystemExit through
        log_callback_error(error)


def log_callback_error(error: BaseException) -> None:
    """Logs an error that must not end the thread, because later tasks need the thread."""
    _log.error("a callback of a future raised %r, which has no effect here", error, exc_info=error)


class Progress:
    """A counter of a save's progress. Any thread may advance it; waiting threads check that it moves."""

    def __init__(self) -> None:
        self.is_bounded = False
        """True if the current step has its own deadline. A meeting has one."""
        self.count = 0
        """Number of steps so far."""

    def advance(self) -> None:
        """Counts one step."""
        self.count += 1

    @contextmanager
    def bounded(self, is_bounded: bool = True) -> Iterator[None]:
        """Sets `is_bounded` within a context."""
        before, self.is_bounded = self.is_bounded, is_bounded
        try:
            yield
        finally:
            self.is_bounded = before


def wait_while_moving(
    future: Future[Any], progress: Progress, patience: float, tick: Callable[[], None] | None = None
) -> bool:
    """Waits for a future while its work makes progress, and calls `tick` after each progress.

    Returns:
        True if the future is done; False after `patience` seconds without progress.
    """
    seen, since = progress.count, time.monotonic()
    while True:
        try:
            future.exception(_POLL_SECONDS)
            return True
        except TimeoutError:
            if future.done():
                return True
        if progress.is_bounded or progress.count != seen:
            seen, since = progress.count, time.monotonic()
            if tick is not None:
                tick()
        elif time.monotonic() - since > patience:
            return False


class _Unfinished:
    """The unfinished saves of this process, for the end of the interpreter."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._saves: dict[Future[Any], tuple[int, Progress, float, str]] = {}
        self._registered_in = 0  # the process: `multiprocessing` drops the functions in a child made by fork

    def add(self, future: Future[Any], progress: Progress, patience: float, what: str) -> None:
        """Adds a save. Called after its threads started, since `atexit` calls the last function first."""
        with self._lock:
            self._saves[future] = os.getpid(), progress, patience, what
            if self._registered_in != os.getpid():
                self._registered_in = os.getpid()
                atexit.register(self.wait)
                multiprocessing.util.Finalize(None, self.wait, exitpriority=0)
        future.add_done_callback(self._remove)

    def _remove(self, future: Future[Any]) -> None:
        with self._lock:
            self._saves.pop(future, None)

    def wait(self) -> None:
        """Waits for each save that makes progress. A second call waits for none of them."""
        with self._lock:
            saves, self._saves = self._saves, {}
        for future, (process, progress, patience, what) in saves.items():
            if process == os.getpid() and not wait_while_moving(future, progress, patience):
                _log.error(
                    "%s: given up at exit, after %.0f s without progress. Run `shardproof ls` to see whether "
                    "it is committed",
                    what,
                    patience,
                )


unfinished = _Unfinished()


def frames_to_notes(error: BaseException) -> None:
    """Replaces the tracebacks of an error and of its causes by notes (note "Frames")."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (one := left.pop()) is None or id(one) in seen:
            continue
        seen.add(id(one))
        if one.__traceback__ is not None:
            calls = traceback.format_tb(one.__traceback__, -_MOST_CALLS)
            one.__traceback__ = None
            if not any(str(note).startswith(_CALLS) for note in getattr(one, "__notes__", ())):
                one.add_note(_CALLS + "".join(calls).rstrip())
        left += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def drop_last_frames(future: Future[SaveResult]) -> None:
    """Removes the traceback of the error of a save that is over: the calls that brought it to the future."""
    if (error := future.exception()) is not None:
        error.__traceback__ = None


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
        if isinstance(error := self._future.exception(), ShardproofError):
            self._reported = True
            raise _copied(error)
        return self._future.result()

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
        return error and _copied(error)

    def __repr__(self) -> str:
        if self._future is None:
            state = "skipped"
        elif not self._future.done():
            state = "saving"
        else:
            state = "failed" if self._future.exception() else "committed"
        return f"PendingSave(step={self.step}, {state})"


def _copied(error: ShardproofError) -> ShardproofError:
    """A copy for a caller to raise (note "Frames"), made without the constructor of its class."""
    kind = type(error)
    copied = kind.__new__(kind, *error.args)
    copied.args = error.args
    for name, value in vars(error).items():  # with the notes
        vars(copied)[name] = value.copy() if isinstance(value, (list, dict)) else value
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied


class _SaveFuture(Future[SaveResult]):
    """The future of a pending save. It calls `PendingSave.result`, which marks an error as reported.

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
