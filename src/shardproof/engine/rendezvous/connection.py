"""The rendezvous that this process finds by itself, and that of a job with one process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardproof._utils import forks
from shardproof._utils.arguments import check_number, wrong_type
from shardproof.engine.rendezvous.meeting_errors import store_lost
from shardproof.engine.rendezvous.protocol import Decide, Operation, Rendezvous, Reservation, Turns
from shardproof.engine.rendezvous.store import StoreRendezvous
from shardproof.engine.rendezvous.store_requests import new_client
from shardproof.errors import StructureError
from shardproof.reentrance import guarded, refuse_inside

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalRendezvous:
    """A rendezvous of one rank. It raises a posted exception, and one that `decide` raises, unchanged.

    Args:
        deadline: as in `Rendezvous`. No other rank waits, so `meet` does not use it.

    >>> LocalRendezvous().meet("save", "plan", b"two", lambda posts: posts[0] * 2)
    b'twotwo'
    """

    def __init__(self, *, deadline: float = 300.0) -> None:
        self.rank = 0
        self.world_size = 1
        self.deadline = deadline
        self._lock = forks.lock()
        self._notification: tuple[str, Future[None]] | None = None

    def meet(self, operation: str, phase: str, post: bytes | BaseException, decide: Decide) -> bytes:
        """Decide on the only post. See `Rendezvous.meet`."""
        if isinstance(post, BaseException):
            try:
                raise post
            finally:
                del post  # its frames have this one
        answer = decide([bytes(post)])
        if isinstance(answer, bytes | bytearray | memoryview):
            return bytes(answer)
        (only,) = answer
        return bytes(only)

    def operation(self, name: str) -> Operation:
        """An operation without other ranks. See `Rendezvous.operation`."""
        return Operation(name)

    def reserve(self) -> Reservation:
        """A reservation that never waits. See `Rendezvous.reserve`."""
        return Turns(lambda: None, lambda: self.deadline, RuntimeError).reserve()

    def progress(self, done: int, total: int) -> None:
        """Does nothing: no other rank waits."""

    def report_waiting(self) -> None:
        """Does nothing: no other rank waits."""

    def new_rendezvous(self, name: str) -> LocalRendezvous:
        """A new rendezvous of this process. See `Rendezvous.new_rendezvous`."""
        return LocalRendezvous(deadline=self.deadline)

    def notify(self, topic: str) -> None:
        """Wake the thread that waits for this notification. See `Rendezvous.notify`."""
        notification = self.notification(topic)
        if not notification.done():
            notification.set_result(None)

    def notification(self, topic: str) -> Future[None]:
        """A future that is done once `notify` has been called. See `Rendezvous.notification`."""
        with self._lock:
            if self._notification is None or self._notification[0] != topic:
                self._notification = topic, Future()
            return self._notification[1]

    def start_heartbeat(self) -> None:
        """Does nothing: no other rank watches."""

    def store_server(self) -> object:
        """None: there is no store."""
        return None

    def close(self) -> None:
        """Does nothing: there are no background threads."""


_DEADLINE = 300.0


def connect(*, deadline: float | None = None, group: ProcessGroup | None = None) -> Rendezvous:
    """The rendezvous of the ranks of this job.

    It uses the first of these that exists:

    - the store of the default process group (it calls no collectives);
    - the store that torchrun serves, or that `MASTER_ADDR` and `MASTER_PORT` name, if `WORLD_SIZE` is above
       1;
    - this process alone.

    A process has one rendezvous per store. All callers share it, so that ranks stay in step.

    Args:
        deadline: seconds that a rank may be silent before the others give it up. It applies from now on to
            all callers that share the rendezvous. None: an open rendezvous keeps its deadline; a new one gets
            300 s.
        group: the process group whose ranks meet, at the store of that group. Its first rank is the
            coordinator. None: all ranks.

    Returns:
        The rendezvous.

    Raises:
        RankSilent: this process cannot reach the store that the environment names within the deadline.
        StructureError: this process is not in `group`.
        ValueError: the environment names more than one rank, but lacks a variable.

    Example:
        >>> connect().world_size
        1
    """
    return _connect(deadline, lasting=True, group=group)


@contextmanager
def connected(rendezvous: Rendezvous | None, deadline: float | None) -> Iterator[Rendezvous]:
    """The rendezvous of one call: the given one, or the one that `connect` finds.

    Args:
        rendezvous: the rendezvous to use; None to find one.
        deadline: the deadline of the found rendezvous until the context ends; None to keep its deadline.

    Raises:
        ValueError: see `check_deadline`.
        RankSilent: see `connect`.

    Example:
        >>> with connected(None, 5.0) as found:
        ...     found.deadline
        5.0
    """
    check_deadline(rendezvous, deadline)
    if rendezvous is not None:
        yield rendezvous
        return
    found = _connect(deadline, lasting=False)
    if deadline is None or not isinstance(found, StoreRendezvous):
        yield found
        return
    _shared.begin_call(found, deadline)
    try:
        yield found
    finally:
        _shared.end_call(found, deadline)


def check_deadline(rendezvous: Rendezvous | None, deadline: float | None) -> None:
    """Refuse a deadline that is not positive, or that comes with a rendezvous.

    Raises:
        TypeError: `rendezvous` is no rendezvous, or the deadline no number.
        ValueError: the deadline is not positive, or both arguments are given.
    """
    if rendezvous is not None and not hasattr(rendezvous, "meet"):
        raise wrong_type("rendezvous", rendezvous, "a rendezvous of shardproof.rendezvous, or None")
    check_number("deadline", deadline, "of seconds")
    if deadline is not None and not deadline > 0:
        raise ValueError(f"a deadline is a positive number of seconds, not {deadline!r}")
    if rendezvous is not None and deadline is not None:
        raise ValueError(
            f"both rendezvous= and deadline={deadline!r} are given, and this rendezvous has a deadline of "
            f"{rendezvous.deadline:g} s: set its `deadline` and leave out deadline=, or leave out rendezvous="
        )


def _connect(deadline: float | None, *, lasting: bool, group: ProcessGroup | None = None) -> Rendezvous:
    """As `connect`. If `lasting` is False, `deadline` bounds only the time to reach the store."""
    refuse_inside("connect", "connect")
    found = _process_group(group)
    if found is not None:
        store, rank, world_size = found
        if world_size == 1:
            return LocalRendezvous(deadline=deadline or _DEADLINE)
        from torch.distributed import get_process_group_ranks

        # The rendezvous has only a client: the server still ends with the group, unless a save holds it.
        return _shared.get(
            store,
            deadline,
            lasting,
            lambda seconds: StoreRendezvous(
                new_client(store),
                rank,
                world_size,
                deadline=seconds,
                server=weakref.ref(store),
                global_ranks=None if group is None else get_process_group_ranks(group),
            ),
        )
    if _number_of("WORLD_SIZE", 1) > 1:
        return _shared.get(None, deadline, lasting, _from_environment)
    return LocalRendezvous(deadline=deadline or _DEADLINE)


def check_group(rendezvous: Rendezvous) -> None:
    """Refuse a rendezvous that belongs to another process group than the current one.

    Raises:
        StructureError: the current process group has another rank or world size.
    """
    group = _process_group()
    if group is None or group[1:] == (rendezvous.rank, rendezvous.world_size):
        return
    _, rank, world_size = group
    raise StructureError(
        f"this process is rank {rank} of {world_size} in the process group, but rank {rendezvous.rank} of "
        f"{rendezvous.world_size} at the rendezvous: init_process_group was called after the rendezvous was "
        "made. Make a new Checkpointer after init_process_group, or give it a rendezvous"
    )


def _process_group(group: ProcessGroup | None = None) -> tuple[Any, int, int] | None:
    """Store, rank and size of a process group, the default group for None. None if there is none."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store, _get_process_group_store

    if group is None:
        return _get_default_store(), dist.get_rank(), dist.get_world_size()
    if dist.get_rank(group) < 0:
        raise StructureError(
            f"rank {dist.get_rank()} is not in the given process group. Call this on the ranks of "
            "the group only"
        )
    return _get_process_group_store(group), dist.get_rank(group), dist.get_world_size(group)


def _number_of(variable: str, absent: int | None = None) -> int:
    """An integer of the launcher's environment, or `absent`.

    Raises:
        KeyError: the variable is not set, and `absent` is None.
        ValueError: it is not an integer.
    """
    text = os.environ.get(variable)
    if text is None:
        if absent is None:
            raise KeyError(variable)
        return absent
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {variable} is {text!r}, expected an integer: start with torchrun, or "
            "unset it"
        ) from None


def _from_environment(deadline: float) -> StoreRendezvous:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    environment = os.environ
    try:
        rank, world_size = _number_of("RANK"), _number_of("WORLD_SIZE")
        host, port = environment["MASTER_ADDR"], _number_of("MASTER_PORT")
    except KeyError as missing:
        raise ValueError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {missing.args[0]} is not set: start with "
            "torchrun, call init_process_group first, set all of RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT, or pass a rendezvous: shardproof.rendezvous.LocalRendezvous() is this process alone"
        ) from None
    served_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        # multi_tenant: a process group that is initialised later shares the server on the same port.
        store: Any = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not served_by_agent,
            timeout=timedelta(seconds=deadline),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:
        text = f"{host}:{port}, {type(error).__name__}: " + str(error).strip().split("\n", 1)[0]
        raise store_lost("connecting", "connect", text, None) from error
    # Workers that torchrun started again use the same keys, and delete those of the former workers.
    return StoreRendezvous(store, rank, world_size, deadline=deadline)


class _Shared:
    """The rendezvous of this process, one per store.

    Two rendezvous at one store would count meetings separately.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._known: list[tuple[weakref.ref[Any] | None, StoreRendezvous]] = []
        self._call_deadlines: weakref.WeakKeyDictionary[StoreRendezvous, list[float]] = (
            weakref.WeakKeyDictionary()
        )
        """The lasting deadline, then the deadlines of the calls under way, oldest first."""

    @guarded("connect")
    def get(
        self, store: Any, deadline: float | None, lasting: bool, make: Callable[[float], StoreRendezvous]
    ) -> StoreRendezvous:
        """The rendezvous at this store (None: that of the environment). Makes it if there is no open one."""
        with self._lock:
            self._known = [
                (reference, known)
                for reference, known in self._known
                if not known.closed and (reference is None or reference() is not None)
            ]
            for reference, known in self._known:
                if (reference() if reference is not None else None) is store:
                    if deadline is not None and lasting:
                        known.deadline = deadline
                        if known in self._call_deadlines:
                            self._call_deadlines[known][0] = deadline
                    return known
            made = make(_DEADLINE if deadline is None else deadline)
            if not lasting:
                made.deadline = _DEADLINE
            self._known.append((None if store is None else weakref.ref(store), made))
            return made

    @guarded("connect")
    def begin_call(self, rendezvous: StoreRendezvous, deadline: float) -> None:
        """Give a rendezvous the deadline of one call. Of several calls, the newest decides."""
        with self._lock:
            self._call_deadlines.setdefault(rendezvous, [rendezvous.deadline]).append(deadline)
            rendezvous.deadline = deadline

    @guarded("connect")
    def end_call(self, rendezvous: StoreRendezvous, deadline: float) -> None:
        """End a call that `begin_call` began."""
        with self._lock:
            lasting, *calls = self._call_deadlines.pop(rendezvous)
            calls.remove(deadline)
            rendezvous.deadline = calls[-1] if calls else lasting
            if calls:
                self._call_deadlines[rendezvous] = [lasting, *calls]


_shared = _Shared()
