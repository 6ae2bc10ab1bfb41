"""The keys of a rendezvous in the store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JoinKeys:
    """Keys with which ranks join a generation of meetings. See the note in `membership`.

    >>> JoinKeys("shardproof/4").hello("0123456789abcdef", 3)
    'shardproof/4/0123456789abcdef/hello/3'
    """

    base: str

    @property
    def announced(self) -> str:
        """The newest generation, written by the coordinator."""
        return f"{self.base}/announced"

    @property
    def opened(self) -> str:
        """Set after the first announcement.

        Ranks wait for this key, because they peek at `announced` (see `store_requests.peek`).
        """
        return f"{self.base}/opened"

    def root(self, generation: str) -> str:
        """The prefix of the keys of a generation."""
        return f"{self.base}/{generation}"

    def hello(self, generation: str, rank: int) -> str:
        """The incarnation of the rank that asks to join."""
        return f"{self.base}/{generation}/hello/{rank}"

    def welcome(self, generation: str, incarnation: str) -> str:
        """Set by the coordinator once it has read the hello of this incarnation."""
        return f"{self.base}/{generation}/welcome/{incarnation}"

    def joined(self, generation: str) -> str:
        """The number of hellos. Only a hint to read them, because a dead incarnation counts, too."""
        return f"{self.base}/{generation}/joined"

    def all_joined(self, generation: str) -> str:
        """Set with the last hello of all other ranks. It wakes the coordinator."""
        return f"{self.base}/{generation}/all joined"

    def trace(self, rank: int) -> str:
        """The locations of a rank's keys, for the rank that replaces it."""
        return f"{self.base}/trace/{rank}"


@dataclass(frozen=True, slots=True)
class MeetingKeys:
    """Keys of one meeting. The parts of a record are below the record's key, see `wire.cut`.

    >>> MeetingKeys("shardproof/4/0123456789abcdef", 7).post(3)
    'shardproof/4/0123456789abcdef/7/post/3'
    """

    root: str
    number: int

    def post(self, rank: int) -> str:
        """The post of a rank."""
        return f"{self.root}/{self.number}/post/{rank}"

    def answer(self, rank: int) -> str:
        """The answer of a rank, if each rank has its own answer."""
        return f"{self.root}/{self.number}/answer/{rank}"

    def beat(self, rank: int) -> str:
        """The signs of life of a rank, under one key for all meetings."""
        return f"{self.root}/beat/{rank}"

    @property
    def shared(self) -> list[str]:
        """The keys that all ranks share."""
        return [self.count, self.ready, self.verdict, self.wake, self.read, self.all_read]

    @property
    def count(self) -> str:
        """The number of ranks that have posted."""
        return f"{self.root}/{self.number}/count"

    @property
    def ready(self) -> str:
        """Set by the rank that posts last. It wakes the coordinator."""
        return f"{self.root}/{self.number}/ready"

    @property
    def verdict(self) -> str:
        """The result of the meeting. Set once, by compare-and-set."""
        return f"{self.root}/{self.number}/verdict"

    @property
    def read(self) -> str:
        """The number of ranks that have read the verdict."""
        return f"{self.root}/{self.number}/read"

    @property
    def all_read(self) -> str:
        """Set by the rank that reads the verdict last. Now the coordinator may end, and the store with it."""
        return f"{self.root}/{self.number}/all read"

    @property
    def wake(self) -> str:
        """Set after the verdict. It wakes all ranks, because compare-and-set wakes none on some servers.

        A rank that leaves the meeting early sets it, too, to end its own wait. So a woken rank reads the
        verdict key, which may still be empty.
        """
        return f"{self.root}/{self.number}/wake"
