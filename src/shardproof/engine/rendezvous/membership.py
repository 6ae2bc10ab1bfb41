"""How ranks join a generation of meetings.

Note: Why ranks find each other in a store that outlives them
-------------------------------------------------------------
A store may hold keys of earlier processes, of ranks that died at any moment, and of rendezvous that this
process made and closed. No rank can tell from a key whether its writer still runs. The ranks have no common
count of earlier joins. So the ranks agree on a random name, the generation. The coordinator and each other
rank prove to each other that they run:

1. Each time the coordinator joins, it draws a new generation and announces it under one fixed key. All keys
   of meetings begin with the generation, so none of them is old.
2. Each other rank reads the announcement and writes a hello in that generation. The hello has the rank's
   incarnation: a random name that the rank drew itself. A dead coordinator may have written the announcement,
   so the rank waits for a welcome.
3. The coordinator welcomes each incarnation that it reads. A welcome names the incarnation, which did not
   exist while an earlier coordinator ran. So a welcome rank shares the generation with a live coordinator.
4. A rank that waits for a welcome reads the announcement again at each step, and writes a new hello after a
   change. A welcome rank stays, because a second rendezvous of the same ranks may write another announcement.
5. When ranks give up a meeting for silence, the verdict may tell all ranks to join again. It does so if the
   coordinator has read a second incarnation of a rank, or if another rank has read a newer announcement. The
   coordinator welcomes the second incarnation to that one meeting, so that no rank is ahead of the others.

Every wait here ends with the deadline of a meeting. The coordinator reads all hellos when their count has
changed, which takes a few requests for thousands of ranks.

Old keys: under one key, each rank keeps a trace of the generations and the meetings in which it has keys, and
of the rendezvous that its process made from this one. The rank that replaces it deletes all these keys after
its own first meeting. By then all ranks have left those generations.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from shardproof._utils import forks
from shardproof.engine.rendezvous import store_requests as requests
from shardproof.engine.rendezvous.wire import (
    Count,
    JoinKeys,
    MeetingKeys,
    RankKeys,
    Token,
    WrongBytes,
    checked,
    part_keys,
    unpack,
)

_OLD_MEETINGS = 64
"""Maximum number of meetings before the last one of a generation whose keys a rank deletes. It bounds the
work if the trace is wrong."""
_OLD_PLACES = 8
"""Maximum number of old generations in a trace. Each failure of a rank before its first meeting adds one."""

_alive: set[str] = set()
"""Incarnations of this process, whose keys are in use. In a forked child, the parent uses them."""


class Membership:
    """The membership of one rank in the current generation.

    Methods that take a store run on threads of links.
    """

    def __init__(self, base: str, rank: int, world_size: int) -> None:
        self.keys = JoinKeys(base)
        self.generation = ""
        """The generation that this rank announced, or wrote its hello in; empty before."""
        self.is_member = False
        """True if the generation has a live coordinator that knows this rank."""
        self.start = 0
        """The first meeting of this rank in the generation."""
        self._rank = rank
        self._world_size = world_size
        self._incarnation = ""
        self._meetings = (0, 0, False)
        self._old: list[RankKeys] = []
        self._others: list[str] = []
        self._lock = forks.lock()
        self._welcomed: dict[int, str] = {}
        self._returned: dict[int, str] = {}
        self._joined = 0
        self.leave(None)

    @property
    def root(self) -> str:
        """The prefix of the keys of the generation."""
        return self.keys.root(self.generation)

    @property
    def welcome_key(self) -> str:
        """The key that a rank waits for until it is welcome."""
        return self.keys.welcome(self.generation, self._incarnation)

    @property
    def has_old_keys(self) -> bool:
        """True if `clean` has keys to delete."""
        return bool(self._old)

    def leave(self, _store: Any) -> None:
        """Leave the generation. The next join uses another incarnation."""
        self.close()
        self._add_old()
        self._incarnation = secrets.token_hex(8)
        _alive.add(self._incarnation)
        self.generation, self.is_member = "", False

    def close(self) -> None:
        """End this incarnation: other incarnations may delete its keys."""
        _alive.discard(self._incarnation)

    def announce(self, store: Any) -> None:
        """Coordinator: begin a generation, unless this rank is in one."""
        if self.is_member:
            return
        generation = secrets.token_hex(8)
        self._find_trace(store, generation)
        store.set(self.keys.announced, msgspec.json.encode(generation))
        store.set(self.keys.opened, b"1")
        with self._lock:
            self._welcomed, self._returned, self._joined = {}, {}, 0
            self.generation, self.is_member = generation, True

    def approach(self, store: Any) -> None:
        """Other ranks: write the hello in the announced generation, unless it is written."""
        value = requests.peek(store, self.keys.announced)
        if value is None:
            return
        generation = checked(self.keys.announced, value, Token)
        if generation == self.generation:
            return
        self._find_trace(store, generation)
        store.set(self.keys.hello(generation, self._rank), msgspec.json.encode(self._incarnation))
        if store.add(self.keys.joined(generation), 1) == self._world_size - 1:
            store.set(self.keys.all_joined(generation), b"1")
        self.generation = generation

    def find_welcome(self, store: Any) -> bool:
        """Other ranks: True once the coordinator has welcomed this rank.

        Until then the rank posts no sign of life, because its earlier incarnation, which may be dead, uses
        the same key.
        """
        if not self.is_member and self.generation and store.check([self.welcome_key]):
            self.start = checked(self.welcome_key, requests.peek(store, self.welcome_key), Count)
            self.is_member = True
            requests.delete(store, [self.welcome_key])
        return self.is_member

    def is_superseded(self, store: Any) -> bool:
        """Other ranks: True if the announced generation is not the one that this rank is in."""
        value = requests.peek(store, self.keys.announced)
        return value is not None and checked(self.keys.announced, value, Token) != self.generation

    def welcome_all(self, store: Any) -> None:
        """Coordinator: wait for as many hellos as there are other ranks, and welcome these ranks."""
        if not self.is_complete:
            requests.wait(store, self.keys.all_joined(self.generation))
            self.welcome(store)

    @property
    def is_complete(self) -> bool:
        """Coordinator: True if all other ranks are welcome."""
        return len(self._welcomed) == self._world_size - 1

    def welcome(self, store: Any) -> None:
        """Coordinator: welcome the ranks that wrote a hello since the last call."""
        with self._lock:
            joined = store.add(self.keys.joined(self.generation), 0)
            if joined == self._joined:
                return
            keys = {rank: self.keys.hello(self.generation, rank) for rank in range(1, self._world_size)}
            hellos = requests.present(store, keys)
            incarnations = {rank: checked(keys[rank], hello, Token) for rank, hello in hellos.items()}
            new = {rank: name for rank, name in incarnations.items() if rank not in self._welcomed}
            requests.set_all(store, {self.keys.welcome(self.generation, name): b"0" for name in new.values()})
            self._welcomed |= new
            self._returned = {
                rank: name for rank, name in incarnations.items() if name != self._welcomed[rank]
            }
            self._joined = joined

    def dismiss(self, store: Any, number: int) -> bool:
        """Coordinator: welcome the second incarnations that ask to join, to one meeting.

        True if there are any. The coordinator gives up that meeting, and its verdict tells all ranks to join
        again.
        """
        keys = [self.keys.welcome(self.generation, name) for name in self._returned.values()]
        requests.set_all(store, dict.fromkeys(keys, b"%d" % number))
        return bool(keys)

    def trace(self, first: int, last: int) -> dict[str, bytes]:
        """The key and value of this rank's trace: it has keys in the meetings from `first` to `last`."""
        self._meetings = first, last, True
        return self._trace(self.generation)

    def note_other(self, base: str) -> None:
        """Record the prefix of a rendezvous that this process made from this one. Sends nothing."""
        self._others.append(base)

    def write_trace(self, store: Any) -> None:
        """Write the trace before the next meeting does, if this rank is in a generation."""
        if self.generation:
            requests.set_all(store, self._trace(self.generation))

    def clean(self, store: Any) -> None:
        """Delete the keys of this rank in generations that all ranks have left."""
        old, self._old = self._old, []
        for place in old:
            _delete_place(store, self.keys, self._rank, place)

    def _trace(self, generation: str) -> dict[str, bytes]:
        places = [*self._old, RankKeys(generation, self._incarnation, *self._meetings, self._others)]
        return {self.keys.trace(self._rank): msgspec.json.encode(places)}

    def _find_trace(self, store: Any, generation: str) -> None:
        """Write the trace of a generation, and note the places of the earlier incarnations."""
        self._add_old()
        found = _read_trace(store, self.keys.trace(self._rank))
        self._old += [place for place in found if place.incarnation not in _alive and place not in self._old]
        while len(self._old) > _OLD_PLACES:
            _delete_place(store, self.keys, self._rank, self._old.pop(0))
        self._meetings = (0, 0, False)
        requests.set_all(store, self._trace(generation))

    def _add_old(self) -> None:
        if self.generation:
            self._old.append(RankKeys(self.generation, self._incarnation, *self._meetings))
            self.generation = ""


def _delete_place(store: Any, base: JoinKeys, rank: int, place: RankKeys) -> None:
    """Delete the keys of a rank in a generation, and those of the rendezvous that it made meanwhile."""
    for other in place.others:
        _delete_rendezvous(store, JoinKeys(other), rank)
    generation, root = place.generation, base.root(place.generation)
    keys = [MeetingKeys(root, 0).beat(rank)]
    if rank == 0:
        keys += [base.joined(generation), base.all_joined(generation)]
    else:
        keys += [base.hello(generation, rank), base.welcome(generation, place.incarnation)]
    requests.delete(store, keys)
    if rank and not place.took_part:
        return  # another rendezvous of this rank may use that generation
    # The meeting after the last one that a coordinator ended may have begun.
    for number in range(max(place.first, place.last - _OLD_MEETINGS), place.last + 2):
        meeting = MeetingKeys(root, number)
        if rank == 0:
            _delete_record(store, meeting.verdict)
            requests.delete(store, meeting.shared)
        else:
            _delete_record(store, meeting.post(rank))
            _delete_record(store, meeting.answer(rank))


def _delete_rendezvous(store: Any, base: JoinKeys, rank: int) -> None:
    """Delete all keys of a rank at a rendezvous of a former process, whose name no process uses again."""
    places = _read_trace(store, base.trace(rank))
    if any(place.incarnation in _alive for place in places):
        return  # this process still uses it
    for place in places:
        _delete_place(store, base, rank, place)
    requests.delete(store, [base.trace(rank), *([] if rank else [base.announced, base.opened])])


def _read_trace(store: Any, key: str) -> list[RankKeys]:
    value = requests.peek(store, key)
    try:
        return checked(key, value, list[RankKeys]) if value is not None else []
    except WrongBytes:
        return []  # a trace only says what to delete


def _delete_record(store: Any, key: str) -> None:
    """Delete a record and its parts."""
    value = requests.peek(store, key)
    if value is None:
        return
    try:
        parts = unpack(key, value).parts
    except WrongBytes:
        parts = 0  # a dead rank wrote it, and no rank reads it
    for part in part_keys(key, parts):
        if requests.peek(store, part) is None:
            break
        requests.delete(store, [part])
    requests.delete(store, [key])
