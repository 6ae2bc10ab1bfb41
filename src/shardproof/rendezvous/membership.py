"""Which generation of meetings a rank belongs to.

Note: Why ranks find each other in a store that outlives them
-------------------------------------------------------------
A store may hold keys of earlier processes, of ranks that died at any moment, and of rendezvous that this
process made and closed. No rank can tell from a key whether its writer lives, and no count of earlier
joins is the same for all ranks. So the ranks agree on a random name, the generation, and each proves
to the other that it lives:

1. The coordinator draws a new generation whenever it joins, and announces it under one fixed key. All keys
   of meetings begin with the generation, so none of them is old.
2. Each other rank reads the announcement and says hello in that generation with its incarnation: a name that
   it drew itself. The announcement may be that of a dead coordinator, so the rank waits to be welcomed.
3. The coordinator welcomes each incarnation that it reads. A welcome names the incarnation, which did not
   exist while an earlier coordinator lived. A rank that is welcome therefore shares the generation with a
   coordinator that lives.
4. A rank that waits to be welcomed looks at the announcement again at each step, and says hello anew when
   it has changed. A rank that is welcome stays, because another announcement may be that of a second
   rendezvous of the same ranks.
5. When a meeting is given up for silence, and the coordinator has read a second incarnation of some rank, or
   another rank has read a newer announcement, then the verdict tells all ranks to join again. The second
   incarnation is welcomed to that one meeting, so that no rank is ahead of the others.

Every wait here ends with the deadline of a meeting, like every other one. The coordinator reads all hellos
when their count has changed, which takes a few requests for thousands of ranks.

Old keys: each rank keeps a trace, under one key, of the generations and the meetings that it has keys in. The
rank that takes its place deletes those keys after its own first meeting, when all ranks have left those
generations.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from shardproof._utils import forks
from shardproof.rendezvous import store_requests as requests
from shardproof.rendezvous.keys import JoinKeys, MeetingKeys
from shardproof.rendezvous.wire import Count, Place, Token, WrongBytes, checked, part_keys, unpack

__all__ = ["Membership"]

_OLD_MEETINGS = 64
"""Of one generation, so many meetings are cleaned at most: a trace is a claim, not a fact."""
_OLD_PLACES = 8
"""Generations in a trace. Ranks that fail before their first meeting add one each time."""

_alive: set[str] = set()
"""Incarnations of this process. What they wrote is in use; in a child made by fork, by its parent."""


class Membership:
    """The part of one rank in the current generation. Methods that take a store run on threads of links.

    Args:
        base: what the keys begin with.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, base: str, rank: int, world_size: int) -> None:
        self.keys = JoinKeys(base)
        self.generation = ""
        """The one that this rank has announced, or said hello in; empty before."""
        self.is_member = False
        """Whether the generation has a coordinator that lives and knows this rank."""
        self.start = 0
        """The meeting with which this rank begins."""
        self._rank = rank
        self._world_size = world_size
        self._incarnation = ""
        self._meetings = (0, 0, False)
        self._old: list[Place] = []
        self._lock = forks.lock()
        self._welcomed: dict[int, str] = {}
        self._returned: dict[int, str] = {}
        self._joined = 0
        self.leave(None)

    @property
    def root(self) -> str:
        """What the keys of the generation begin with."""
        return self.keys.root(self.generation)

    @property
    def welcome_key(self) -> str:
        """What a rank that is not welcome yet waits for."""
        return self.keys.welcome(self.generation, self._incarnation)

    @property
    def has_old_keys(self) -> bool:
        """Whether there is something for `clean` to do."""
        return bool(self._old)

    def leave(self, _store: Any) -> None:
        """Forget the generation. The next join is that of another incarnation."""
        self.close()
        self._add_old()
        self._incarnation = secrets.token_hex(8)
        _alive.add(self._incarnation)
        self.generation, self.is_member = "", False

    def close(self) -> None:
        """This incarnation ends: what it wrote may be deleted."""
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
        """Other ranks: say hello in the generation that is announced, unless that was done."""
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
        """Other ranks: whether this rank is welcome, and so takes part.

        Until then it shows no sign of life: its former incarnation, which may be dead, has the same key.
        """
        if not self.is_member and self.generation and store.check([self.welcome_key]):
            self.start = checked(self.welcome_key, requests.peek(store, self.welcome_key), Count)
            self.is_member = True
            requests.delete(store, [self.welcome_key])
        return self.is_member

    def is_superseded(self, store: Any) -> bool:
        """Other ranks: whether a newer generation is announced than the one that this rank is in."""
        value = requests.peek(store, self.keys.announced)
        return value is not None and checked(self.keys.announced, value, Token) != self.generation

    def welcome_all(self, store: Any) -> None:
        """Coordinator: wait until as many hellos as there are other ranks were said, and welcome them."""
        if not self.is_complete:
            requests.wait(store, self.keys.all_joined(self.generation))
            self.welcome(store)

    @property
    def is_complete(self) -> bool:
        """Coordinator: whether all other ranks are welcome."""
        return len(self._welcomed) == self._world_size - 1

    def welcome(self, store: Any) -> None:
        """Coordinator: welcome the ranks that said hello since it was called last."""
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
        """Coordinator: let the ranks of which a second incarnation asks to join take part in one meeting.

        It is given up, and its verdict tells all ranks to join again.

        Returns:
            whether there are such ranks.
        """
        keys = [self.keys.welcome(self.generation, name) for name in self._returned.values()]
        requests.set_all(store, dict.fromkeys(keys, b"%d" % number))
        return bool(keys)

    def trace(self, first: int, last: int) -> dict[str, bytes]:
        """The key and the value that tell where this rank has keys: from one meeting to another."""
        self._meetings = first, last, True
        return self._trace(self.generation)

    def clean(self, store: Any) -> None:
        """Delete what this rank has in generations that all ranks have left."""
        old, self._old = self._old, []
        for place in old:
            self._delete_place(store, place)

    def _trace(self, generation: str) -> dict[str, bytes]:
        places = [*self._old, Place(generation, self._incarnation, *self._meetings)]
        return {self.keys.trace(self._rank): msgspec.json.encode(places)}

    def _find_trace(self, store: Any, generation: str) -> None:
        """Leave a trace of a generation, and note the places of the incarnations before this one."""
        self._add_old()
        key = self.keys.trace(self._rank)
        value = requests.peek(store, key)
        try:
            found = checked(key, value, list[Place]) if value is not None else []
        except WrongBytes:
            found = []  # it only tells what to delete
        self._old += [place for place in found if place.incarnation not in _alive and place not in self._old]
        while len(self._old) > _OLD_PLACES:
            self._delete_place(store, self._old.pop(0))
        self._meetings = (0, 0, False)
        requests.set_all(store, self._trace(generation))

    def _add_old(self) -> None:
        if self.generation:
            self._old.append(Place(self.generation, self._incarnation, *self._meetings))
            self.generation = ""

    def _delete_place(self, store: Any, place: Place) -> None:
        generation, root = place.generation, self.keys.root(place.generation)
        keys = [MeetingKeys(root, 0).beat(self._rank)]
        if self._rank == 0:
            keys += [self.keys.joined(generation), self.keys.all_joined(generation)]
        else:
            keys += [
                self.keys.hello(generation, self._rank),
                self.keys.welcome(generation, place.incarnation),
            ]
        requests.delete(store, keys)
        if self._rank and not place.took_part:
            return  # another rendezvous of this rank may take part
        # The meeting after the last one that a coordinator ended may have begun.
        for number in range(max(place.first, place.last - _OLD_MEETINGS), place.last + 2):
            meeting = MeetingKeys(root, number)
            if self._rank == 0:
                _delete_record(store, meeting.verdict)
                requests.delete(store, meeting.shared)
            else:
                _delete_record(store, meeting.post(self._rank))
                _delete_record(store, meeting.answer(self._rank))


def _delete_record(store: Any, key: str) -> None:
    """Delete a record and its parts."""
    value = requests.peek(store, key)
    if value is None:
        return
    try:
        parts = unpack(key, value).parts
    except WrongBytes:
        parts = 0  # of a dead rank, and never read
    for part in part_keys(key, parts):
        if requests.peek(store, part) is None:
            break
        requests.delete(store, [part])
    requests.delete(store, [key])
