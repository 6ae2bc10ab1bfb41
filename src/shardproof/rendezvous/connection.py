"""The rendezvous of this process, found without being told."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from shardproof._utils import forks
from shardproof.errors import StructureError
from shardproof.reentrance import guarded, refuse_inside
from shardproof.rendezvous.meeting_errors import store_lost
from shardproof.rendezvous.protocol import Rendezvous
from shardproof.rendezvous.single_process import LocalRendezvous
from shardproof.rendezvous.store import StoreRendezvous

__all__ = ["check_deadline", "check_group", "connect", "connected"]

_DEADLINE = 300.0


def connect(*, deadline: float | None = None) -> Rendezvous:
    """The place where the ranks of this job meet.

    It is, in this order: the store of the default process group, if that is initialised (its collectives stay
    unused); the store that torchrun serves, or that `MASTER_ADDR` and `MASTER_PORT` name, if the environment
    tells of more than one rank; otherwise this process alone. One process has one rendezvous for each store,
    and all callers share it, so that ranks stay in step whoever meets.

    Args:
        deadline: seconds of silence after which a rank is given up (300 unless told); holds from now on for
            all who share the rendezvous.

    Raises:
        RankSilent: the store that the environment names cannot be reached within the deadline.
        ValueError: the environment names ranks but is incomplete.

    >>> connect().world_size
    1
    """
    return _connect(deadline, lasting=True)


@contextmanager
def connected(rendezvous: Rendezvous | None, deadline: float | None) -> Iterator[Rendezvous]:
    """The rendezvous of one call: the one that is given, or the one that `connect` finds.

    Args:
        rendezvous: the given one; None to find one.
        deadline: of the found one, until the context ends; None: the one that it has.

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
    _shared.lend(found, deadline)
    try:
        yield found
    finally:
        _shared.take_back(found, deadline)


def check_deadline(rendezvous: Rendezvous | None, deadline: float | None) -> None:
    """Refuses a deadline that is no number of seconds, or that comes with a rendezvous.

    Raises:
        ValueError: the deadline is not positive, or both arguments are given.
    """
    if deadline is not None and not deadline > 0:
        raise ValueError(f"a deadline is a positive number of seconds, not {deadline!r}")
    if rendezvous is not None and deadline is not None:
        raise ValueError(
            f"both rendezvous= and deadline={deadline!r} are given, and this rendezvous has a deadline of "
            f"{rendezvous.deadline:g} s: set its `deadline` and leave out deadline=, or leave out rendezvous="
        )


def _connect(deadline: float | None, *, lasting: bool) -> Rendezvous:
    """See `connect`. A deadline that does not last is used to reach the store, and changes nothing else."""
    refuse_inside("connect", "connect")
    group = _process_group()
    if group is not None:
        store, rank, world_size = group
        if world_size == 1:
            return LocalRendezvous(deadline=deadline or _DEADLINE)
        # A clone is a client only: the group's own server ends when the group is destroyed, as it would
        # without us, unless a save under way holds it.
        return _shared.get(
            store,
            deadline,
            lasting,
            lambda seconds: StoreRendezvous(
                store.clone(), rank, world_size, deadline=seconds, server=weakref.ref(store)
            ),
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ:
        return _shared.get(None, deadline, lasting, lambda seconds: _from_environment(os.environ, seconds))
    return LocalRendezvous(deadline=deadline or _DEADLINE)


def check_group(rendezvous: Rendezvous) -> None:
    """Refuse a rendezvous that `connect` found for another process group than the current one.

    Raises:
        StructureError: the process group that is initialised has another rank or world size.
    """
    group = _process_group()
    if group is None or group[1:] == (rendezvous.rank, rendezvous.world_size):
        return
    _, rank, world_size = group
    raise StructureError(
        f"this process is rank {rank} of {world_size} in the process group, but rank {rendezvous.rank} of "
        f"{rendezvous.world_size} where the ranks meet: the process group was made, or made again, after the "
        "ranks had been looked for. Make a new Checkpointer after init_process_group, or give it a rendezvous"
    )


def _process_group() -> tuple[Any, int, int] | None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store(), dist.get_rank(), dist.get_world_size()


def _from_environment(environment: Mapping[str, str], deadline: float) -> StoreRendezvous:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except KeyError as missing:
        raise ValueError(
            f"WORLD_SIZE and MASTER_ADDR are set but {missing.args[0]} is not: start with torchrun, set "
            "all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or pass a rendezvous"
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
    if served_by_agent:
        # Workers that torchrun started again must not find what the former ones wrote.
        store = PrefixStore(f"/worker/attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return StoreRendezvous(store, rank, world_size, deadline=deadline)


class _Shared:
    """The rendezvous of this process, by store: two for one store would number their meetings apart."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._known: list[tuple[weakref.ref[Any] | None, StoreRendezvous]] = []
        self._lent: weakref.WeakKeyDictionary[StoreRendezvous, list[float]] = weakref.WeakKeyDictionary()
        """The lasting deadline, then those of the calls under way, where there are any."""

    @guarded("connect")
    def get(
        self, store: Any, deadline: float | None, lasting: bool, make: Callable[[float], StoreRendezvous]
    ) -> StoreRendezvous:
        """The rendezvous at this store (None: the environment's), made if there is none that can be used."""
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
                        if known in self._lent:
                            self._lent[known][0] = deadline
                    return known
            made = make(_DEADLINE if deadline is None else deadline)
            if not lasting:
                made.deadline = _DEADLINE
            self._known.append((None if store is None else weakref.ref(store), made))
            return made

    @guarded("connect")
    def lend(self, rendezvous: StoreRendezvous, deadline: float) -> None:
        """Gives a rendezvous the deadline of one call. The last call that began decides."""
        with self._lock:
            self._lent.setdefault(rendezvous, [rendezvous.deadline]).append(deadline)
            rendezvous.deadline = deadline

    @guarded("connect")
    def take_back(self, rendezvous: StoreRendezvous, deadline: float) -> None:
        """Ends a call that `lend` began."""
        with self._lock:
            lasting, *calls = self._lent.pop(rendezvous)
            calls.remove(deadline)
            rendezvous.deadline = calls[-1] if calls else lasting
            if calls:
                self._lent[rendezvous] = [lasting, *calls]


_shared = _Shared()
