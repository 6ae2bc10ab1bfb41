"""The names of a rendezvous's keys in the store."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["JoinKeys", "MeetingKeys", "beat_key"]


def beat_key(root: str, rank: int) -> str:
    """Where a rank posts its signs of life, whatever the meeting."""
    return f"{root}/beat/{rank}"


@dataclass(frozen=True, slots=True)
class JoinKeys:
    """Keys with which ranks join a generation of meetings. See the note in `membership`.

    >>> JoinKeys("shardproof/4").hello("0123456789abcdef", 3)
    'shardproof/4/0123456789abcdef/hello/3'
    """

    base: str

    @property
    def announced(self) -> str:
        """The newest generation. The coordinator writes it."""
        return f"{self.base}/announced"

    @property
    def opened(self) -> str:
        """Set after the first announcement. Ranks wait for this key, because they look at the other."""
        return f"{self.base}/opened"

    def root(self, generation: str) -> str:
        """What the keys of a generation begin with."""
        return f"{self.base}/{generation}"

    def hello(self, generation: str, rank: int) -> str:
        """The random name of the rank that asks to join."""
        return f"{self.base}/{generation}/hello/{rank}"

    def welcome(self, generation: str, incarnation: str) -> str:
        """Set by the coordinator once it has read the hello of this incarnation."""
        return f"{self.base}/{generation}/welcome/{incarnation}"

    def joined(self, generation: str) -> str:
        """How many hellos were said. A hint to look at them: an incarnation may count for a dead one."""
        return f"{self.base}/{generation}/joined"

    def all_joined(self, generation: str) -> str:
        """Set when as many hellos were said as there are other ranks: the coordinator wakes."""
        return f"{self.base}/{generation}/all joined"

    def trace(self, rank: int) -> str:
        """Where a rank has keys in the store, for the rank that takes its place."""
        return f"{self.base}/trace/{rank}"


@dataclass(frozen=True, slots=True)
class MeetingKeys:
    """Keys of one meeting. A record's parts stand below the record's key, see `wire.cut`.

    >>> MeetingKeys("shardproof/4/0123456789abcdef", 7).post(3)
    'shardproof/4/0123456789abcdef/7/post/3'
    """

    root: str
    number: int

    def post(self, rank: int) -> str:
        """What a rank posted."""
        return f"{self.root}/{self.number}/post/{rank}"

    def answer(self, rank: int) -> str:
        """What a rank is answered, where every rank has an answer of its own."""
        return f"{self.root}/{self.number}/answer/{rank}"

    def beat(self, rank: int) -> str:
        """Where a rank posts its signs of life."""
        return beat_key(self.root, rank)

    @property
    def shared(self) -> list[str]:
        """The keys that belong to no single rank."""
        return [self.count, self.ready, self.verdict, self.wake, self.read, self.all_read]

    @property
    def count(self) -> str:
        """How many ranks have posted."""
        return f"{self.root}/{self.number}/count"

    @property
    def ready(self) -> str:
        """Set by the rank that posts last: the coordinator wakes."""
        return f"{self.root}/{self.number}/ready"

    @property
    def verdict(self) -> str:
        """How the meeting ended. Set once, by compare-and-set."""
        return f"{self.root}/{self.number}/verdict"

    @property
    def read(self) -> str:
        """How many ranks have read the verdict."""
        return f"{self.root}/{self.number}/read"

    @property
    def all_read(self) -> str:
        """Set by the rank that reads the verdict last: the coordinator, and the store with it, may go."""
        return f"{self.root}/{self.number}/all read"

    @property
    def wake(self) -> str:
        """Set after the verdict: everybody wakes. Compare-and-set does not wake waiters in every server.

        A rank that leaves the meeting early sets it too, so that its own wait ends: who wakes has to look.
        """
        return f"{self.root}/{self.number}/wake"
