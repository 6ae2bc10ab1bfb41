"""How the ranks of a job learn what each of them found in a run.

Note: A rank that raises or leaves does not strand the others
-------------------------------------------------------------
1. A rank that raises inside the machine's `with` block comes to the vote that the others will come to next,
   under the same name, and posts its exception there: the meeting fails on all ranks, with the cause. Also
   where the others meet for something else first, such as a save: a posted exception fails any meeting.
2. It must not wait for them for long: they may be inside a collective that ends only when its process does.
   So it waits at most `ERROR_POST_SECONDS`. Rank 0 coordinates the meetings: it cuts its deadline to that
   time, and then its exception stands as the verdict. The exception of another rank stays in the store, where
   rank 0 finds it. The thread that would read the answer ends with the process.
3. A rank that leaves without a word (killed, or a loop that ends early) is silent, and named after the
   deadline.
4. With a process group the quiet steps need no meeting: one all-reduce of three numbers shows that nobody has
   anything to say, and that all are in the same step. If somebody has, all ranks meet. A rank that raises
   starts its share of that all-reduce, does not wait for it, and goes to the meeting. An all-reduce that
   fails (a peer has ended) is posted as an exception in the same way. So the group should be used for nothing
   else: a collective of training could meet the all-reduce of a rank that raised.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardproof.collectives import all_reduce
from shardproof.errors import ShardproofError
from shardproof.rendezvous import MeetingSequence, Rendezvous
from shardproof.rerun.attribution import Suspect
from shardproof.rerun.transitions import State, Votes

__all__ = ["ERROR_POST_SECONDS", "Ballot", "BallotExchange", "count"]

ERROR_POST_SECONDS = 10.0
"""Seconds for which a rank that raised waits for the others to hear of it, at most."""
_QUIET, _SPEAKS = 0, 1


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank has to say after a run."""

    rejected: bool = False
    fatal: bool = False
    suspect: Suspect | None = None
    """The first rejected result of this rank in this step, as far as it is known."""
    outside: tuple[tuple[int, str], ...] = ()
    """What is wrong outside of the step, each with the rank that it is about."""

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to say."""
        return self == Ballot()

    def to_json(self) -> bytes:
        """This ballot as a post; nothing where there is nothing to say."""
        return b"" if self.quiet else json.dumps(asdict(self)).encode()

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Ballot:
        """The ballot that `to_json` described."""
        suspect = plain["suspect"]
        outside = tuple((rank, message) for rank, message in plain["outside"])
        return cls(**(plain | {"suspect": suspect and Suspect.from_plain(suspect), "outside": outside}))


def count(ballots: Sequence[Ballot], *, report: bool) -> Votes:
    """The votes that the table is asked with.

    >>> count([Ballot(), Ballot(rejected=True, fatal=True)], report=False).fatal
    True
    """
    suspects = [ballot.suspect for ballot in ballots if ballot.suspect is not None]
    return Votes(
        rejected=any(ballot.rejected for ballot in ballots),
        fatal=any(ballot.fatal for ballot in ballots),
        reproduced=any(suspect.reproduced for suspect in suspects),
        same_device=any(suspect.reproduced and suspect.same_device for suspect in suspects),
        moved=any(not suspect.same_device for suspect in suspects),
        outside=any(ballot.outside for ballot in ballots),
        report=report,
    )


class BallotExchange:
    """Where the ranks' ballots meet.

    Args:
        rendezvous: of all ranks.
        group: of all ranks, for the votes alone; None to meet after each run.
    """

    def __init__(self, rendezvous: Rendezvous, group: ProcessGroup | None) -> None:
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._rendezvous = rendezvous
        self._group = group
        self._device = None if group is None else _device_of(group)

    def vote(
        self, step: int, state: State, fill: Callable[[], Ballot], *, quick: bool = True
    ) -> list[Ballot]:
        """The ballots of all ranks, in the order of the ranks; the same on every rank.

        Args:
            step: that the machine is in.
            state: of the machine.
            fill: makes the ballot of this rank. What it raises fails the vote on all ranks.
            quick: whether to ask first, over the group if there is one, if anybody has something to say.

        Raises:
            RankFailure, RankSilent, StructureError: see `Rendezvous.meet`; equal on all ranks.
        """
        if self.world_size == 1:
            return [fill()]
        ballot: Ballot | BaseException
        try:
            ballot = fill()
        except BaseException as error:
            ballot = error
        if self._group is not None and quick:
            try:
                if self._all_quiet(step, ballot):
                    return [Ballot()] * self.world_size
            except RuntimeError as error:  # a peer has ended
                ballot = ballot if isinstance(ballot, BaseException) else error

        def post() -> bytes:
            if isinstance(ballot, BaseException):
                raise ballot
            return ballot.to_json()

        answer = MeetingSequence(self._rendezvous, _operation(step)).meet(state.value, post, _all_of)
        if not answer:
            return [Ballot()] * self.world_size
        return [Ballot() if plain is None else Ballot.from_plain(plain) for plain in json.loads(answer)]

    def fail(self, step: int, state: State, error: BaseException) -> None:
        """Let the others know that this rank raised. See the note above."""
        if self.world_size == 1:
            return
        if self._group is not None:
            self._start(step, _SPEAKS)
        rendezvous, before = self._rendezvous, self._rendezvous.deadline
        patience = min(before, ERROR_POST_SECONDS)
        if self.rank == 0:
            rendezvous.deadline = patience

        def tell() -> None:
            try:
                rendezvous.meet(_operation(step), state.value, error, _all_of)
            except ShardproofError:
                pass  # it carries the error that was posted, which the caller is about to raise

        teller = threading.Thread(target=tell, name="shardproof-last-word", daemon=True)
        teller.start()
        teller.join(patience + 1.0)
        rendezvous.deadline = before

    def _all_quiet(self, step: int, ballot: Ballot | BaseException) -> bool:
        quiet = isinstance(ballot, Ballot) and ballot.quiet
        tensor, work = self._start(step, _QUIET if quiet else _SPEAKS)
        work.wait()
        speaks, last, first = tensor.tolist()
        return bool(speaks == _QUIET and last == -first)

    def _start(self, step: int, word: int) -> tuple[torch.Tensor, Any]:
        tensor = torch.tensor([word, step, -step], dtype=torch.int64, device=self._device)
        return tensor, all_reduce(tensor, self._group, dist.ReduceOp.MAX)


def _operation(step: int) -> str:
    return f"validate step {step}"


def _all_of(posts: list[bytes]) -> bytes:
    """Nothing if nobody has anything to say, else what each says."""
    if not any(posts):
        return b""
    return json.dumps([json.loads(post) if post else None for post in posts]).encode()


def _device_of(group: ProcessGroup) -> torch.device:
    """A device whose tensors the group can reduce, the CPU if it can."""
    kinds = [part.split(":")[0] for part in str(dist.get_backend_config(group)).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
