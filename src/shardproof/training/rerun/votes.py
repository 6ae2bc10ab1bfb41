"""The exchange of ballots between the ranks of a job, after each run.

Note: A rank that raises or exits does not block the other ranks
----------------------------------------------------------------
1. A rank that raises inside the machine's `with` block joins the next vote of the other ranks, under the same
   name, and posts its exception there. The meeting fails on all ranks, with the cause. A posted exception
   also fails any other meeting that the ranks hold first, such as the meeting of a save.
2. The rank must not wait for long, because the other ranks may be in a collective that ends only when this
   process ends. So it waits at most `ERROR_POST_SECONDS`. Rank 0 coordinates the meetings: it cuts its
   deadline to that time, and its exception becomes the verdict. The exception of another rank stays in the
   store, where rank 0 reads it. The thread that waits for the answer ends with the process.
3. A rank that exits without a post (killed, or a loop that ends early) is silent. The meeting names it after
   the deadline.
4. With a process group, a step in which all ballots are empty needs no meeting. One all-reduce of three
   numbers shows that all ballots are empty and that all ranks are in the same step. Otherwise all ranks meet.
   A rank that raises starts its all-reduce, does not wait for it, and joins the meeting. A rank whose
   all-reduce fails (a peer has exited) posts that exception in the same way. The group must be used for
   nothing else: a collective of training could match the all-reduce of a rank that raised.
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

from shardproof._utils.accelerator import device_of_group
from shardproof.engine.rendezvous import MeetingSequence, Rendezvous
from shardproof.errors import ShardproofError
from shardproof.training.collectives import all_reduce
from shardproof.training.rerun.attribution import Suspect
from shardproof.training.rerun.transitions import State, Votes

ERROR_POST_SECONDS = 10.0
"""Seconds for which a rank that raised waits until the other ranks have read its exception, at most."""
_EMPTY, _NOT_EMPTY = 0, 1


@dataclass(frozen=True, slots=True)
class Ballot:
    """The report of one rank after a run."""

    rejected: bool = False
    fatal: bool = False
    suspect: Suspect | None = None
    """The first rejected result of this rank in this step."""
    outside: tuple[tuple[int, str], ...] = ()
    """Faults outside of the step, each with the rank at fault."""

    @property
    def is_empty(self) -> bool:
        """True if the rank rejected no result and reports no fault."""
        return self == Ballot()

    def to_json(self) -> bytes:
        """Encode this ballot; an empty ballot gives no bytes."""
        return b"" if self.is_empty else json.dumps(asdict(self)).encode()

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Ballot:
        """Decode a ballot from the parsed JSON of `to_json`."""
        suspect = plain["suspect"]
        outside = tuple((rank, message) for rank, message in plain["outside"])
        return cls(**(plain | {"suspect": suspect and Suspect.from_plain(suspect), "outside": outside}))


def count(ballots: Sequence[Ballot], *, report: bool) -> Votes:
    """Combine ballots into the votes for the table.

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
    """Exchanges ballots between all ranks.

    Args:
        rendezvous: the rendezvous of all ranks.
        group: a process group of all ranks, used only for votes; None to meet after each run.
    """

    def __init__(self, rendezvous: Rendezvous, group: ProcessGroup | None) -> None:
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._rendezvous = rendezvous
        self._group = group
        # Without a number, so that each vote uses the device that is current then.
        self._device = None if group is None else torch.device(device_of_group(group).type)

    def vote(
        self, step: int, state: State, fill: Callable[[], Ballot], *, quick: bool = True
    ) -> list[Ballot]:
        """Return the ballots of all ranks, in rank order and equal on every rank.

        Args:
            step: the current step.
            state: the machine's state.
            fill: makes the ballot of this rank. An exception in it fails the vote on all ranks.
            quick: with a group, first check by an all-reduce whether all ballots are empty.

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
                is_empty = isinstance(ballot, Ballot) and ballot.is_empty
                tensor, work = self._start(step, _EMPTY if is_empty else _NOT_EMPTY)
                work.wait()
                flag, last_step, negated_first_step = tensor.tolist()
                if flag == _EMPTY and last_step == -negated_first_step:
                    return [Ballot()] * self.world_size
            except RuntimeError as error:  # a peer has exited
                ballot = ballot if isinstance(ballot, BaseException) else error

        def post() -> bytes:
            if isinstance(ballot, BaseException):
                raise ballot
            return ballot.to_json()

        answer = MeetingSequence(self._rendezvous, _operation(step)).meet(state.value, post, _join_posts)
        if not answer:
            return [Ballot()] * self.world_size
        return [Ballot() if plain is None else Ballot.from_plain(plain) for plain in json.loads(answer)]

    def fail(self, step: int, state: State, error: BaseException) -> None:
        """Post the exception of this rank to the other ranks. See the note above."""
        if self.world_size == 1:
            return
        if self._group is not None:
            self._start(step, _NOT_EMPTY)
        rendezvous, before = self._rendezvous, self._rendezvous.deadline
        timeout = min(before, ERROR_POST_SECONDS)
        if self.rank == 0:
            rendezvous.deadline = timeout

        def post_error() -> None:
            try:
                rendezvous.meet(_operation(step), state.value, error, _join_posts)
            except ShardproofError:
                pass  # the meeting raises the posted error, which the caller is about to raise

        poster = threading.Thread(target=post_error, name="shardproof-post-error", daemon=True)
        poster.start()
        poster.join(timeout + 1.0)
        rendezvous.deadline = before

    def _start(self, step: int, flag: int) -> tuple[torch.Tensor, Any]:
        tensor = torch.tensor([flag, step, -step], dtype=torch.int64, device=self._device)
        return tensor, all_reduce(tensor, self._group, dist.ReduceOp.MAX)


def _operation(step: int) -> str:
    return f"validate step {step}"


def _join_posts(posts: list[bytes]) -> bytes:
    """The posts in one JSON list; no bytes if all ballots are empty."""
    if not any(posts):
        return b""
    return json.dumps([json.loads(post) if post else None for post in posts]).encode()
