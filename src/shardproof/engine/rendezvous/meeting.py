"""One meeting: the part of the coordinator, and the part of the other ranks. See the note in `store`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardproof.engine import events
from shardproof.engine.rendezvous import meeting_errors
from shardproof.engine.rendezvous.channel import Channel, CoordinatorSilent
from shardproof.engine.rendezvous.heartbeat import Watch, amounts, describe, is_elsewhere
from shardproof.engine.rendezvous.protocol import Decide
from shardproof.engine.rendezvous.store_requests import LinkLost, is_over
from shardproof.engine.rendezvous.wire import (
    ALL,
    BYTES,
    EACH,
    ERROR,
    GIVEN_UP,
    MeetingKeys,
    Record,
    WrongBytes,
    pack,
    pack_error,
    unpack,
    unpack_error,
)
from shardproof.errors import RankFailure, RankSilent, ShardproofError
from shardproof.reentrance import guarded

_LONGEST_WAIT_FOR_READERS = 10.0
"""Maximum seconds for which the coordinator waits until the ranks have read its verdict."""


class MeetingGivenUp(Exception):
    """The other ranks gave up this meeting of another operation. This rank continues with the next."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The number and the purpose of one meeting."""

    number: int
    world_size: int
    operation: str
    phase: str
    deadline: float
    waits_for_readers: bool
    """True if the coordinator waits until the ranks have read its verdict, because its process may serve the
    store."""
    operation_position: tuple[str, int]
    """Name of the operation, and number of its earlier meetings. Equal on all ranks of the operation."""

    def record(self, kind: str, body: bytes, readers: int = 0, *, renew: int | None = None) -> bytes:
        """A record of this meeting."""
        position = self.operation_position if kind == GIVEN_UP else ("", 0)
        readers = readers if self.waits_for_readers else 0
        return pack(self.operation, self.phase, kind, body, readers, renew=renew, operation_position=position)


@guarded("a meeting")
def attend(channel: Channel, meeting: Meeting, post: bytes | BaseException, decide: Decide) -> bytes:
    """Take part in a meeting, on rank 0 as its coordinator. Returns the answer or raises the common error."""
    channel.heartbeat.enter(meeting.phase)
    cause = post if isinstance(post, BaseException) else None
    try:
        keys = channel.join(meeting.number)
        channel.heartbeat.joined(keys.number)
        if channel.rank == 0:
            return _coordinate(channel, meeting, keys, post, decide)
        return _take_part(channel, meeting, keys, post)
    except LinkLost as lost:
        error = meeting_errors.store_lost(meeting.operation, meeting.phase, str(lost), channel.last_heard(0))
        # If the server was only stopped, this verdict takes effect when the server resumes.
        channel.propose_failure(meeting.number, meeting.record(GIVEN_UP, pack_error(error)))
        raise error from (cause or lost)
    except CoordinatorSilent as silent:
        error = _silence(channel, meeting, silent.watch, [0])
        channel.propose_failure(meeting.number, meeting.record(GIVEN_UP, pack_error(error)))
        raise error from cause
    except WrongBytes as wrong:
        failure = meeting_errors.wrong_bytes(meeting.operation, meeting.phase, str(wrong))
        channel.propose_failure(meeting.number, meeting.record(GIVEN_UP, pack_error(failure)))
        raise failure from (cause or wrong)
    except ShardproofError as error:
        if cause is not None:
            raise error from cause
        raise
    finally:
        channel.heartbeat.leave()


def _take_part(channel: Channel, meeting: Meeting, keys: MeetingKeys, post: bytes | BaseException) -> bytes:
    kind, body = _as_post(post)
    channel.post(keys, meeting.record(kind, body), body, others=meeting.world_size - 1)
    waiting = channel.until_verdict(keys)
    watch = Watch([0], time.monotonic(), 2 * channel.heartbeat.period)
    try:
        verdict = None
        while verdict is None:
            if is_over(waiting, channel.heartbeat.period):
                verdict = waiting.result()
                if verdict is not None:
                    break
                time.sleep(channel.heartbeat.period)  # a rank that left set the wake key: no verdict yet
            channel.heartbeat.tick()
            view = channel.look(keys, posts_of=[], signs_of=[0])
            verdict = view.verdict
            _observe(channel, keys, watch, {0: view.signs.get(0)})
            if verdict is None and watch.silent(meeting.deadline):
                error = _silence(channel, meeting, watch, [0], keys)
                renew = channel.rank if _needs_new_generation(channel, keys, watch, [0]) else None
                verdict = channel.propose(keys, meeting.record(GIVEN_UP, pack_error(error), renew=renew))
    finally:
        channel.release(waiting, keys.wake)
    return _answer(channel, meeting, keys, verdict)


def _coordinate(
    channel: Channel, meeting: Meeting, keys: MeetingKeys, post: bytes | BaseException, decide: Decide
) -> bytes:
    found = _collect(channel, meeting, keys, post)
    if isinstance(found, bytes):
        outcome, ours, verdict = _Outcome(), b"", found
    else:
        outcome = _conclude(channel, meeting, found, decide)
        ours, verdict = _publish(channel, meeting, keys, outcome)
    if unpack(keys.verdict, verdict).readers > 0:
        # For a limited time: the verdict stands in any case.
        waiting = channel.until_read(keys)
        is_over(waiting, min(meeting.deadline, _LONGEST_WAIT_FOR_READERS))
        channel.release(waiting, keys.all_read)
    if verdict == ours and outcome.error is None:
        channel.sweep(meeting.number)
        return outcome.answer if outcome.answers is None else outcome.answers[0]
    try:
        return _answer(channel, meeting, keys, verdict)
    except ShardproofError as error:
        if outcome.cause is None:
            raise
        if not isinstance(outcome.cause, Exception):
            raise outcome.cause from None  # an interrupt or exit keeps its class on its own rank
        raise error from outcome.cause


def _collect(
    channel: Channel, meeting: Meeting, keys: MeetingKeys, post: bytes | BaseException
) -> dict[int, Record] | bytes:
    """All posts by rank; or the verdict that stands, if a rank gave up the meeting."""
    kind, body = _as_post(post)
    posts = {0: Record(meeting.operation, meeting.phase, kind, body)}
    if meeting.world_size == 1:
        return posts
    watch = Watch(range(1, meeting.world_size), time.monotonic(), 2 * channel.heartbeat.period)
    waiting, is_read = channel.until_ready(keys, watch.ranks), False
    failed_at = time.monotonic() if kind == ERROR else None
    try:
        while watch.ranks:
            takes = not is_read and is_over(waiting, channel.heartbeat.period)
            if is_read:
                time.sleep(channel.heartbeat.period)  # the count was complete, but a post was missing
            channel.heartbeat.tick()
            asked = [] if takes else watch.ranks
            view = channel.look(keys, posts_of=asked, signs_of=asked, known=len(posts) - 1)
            if view.verdict is not None:
                return view.verdict
            found = view.posts
            if takes:
                found, is_read = waiting.result(), True
            for rank, value in found.items():
                posts[rank] = _read_post(meeting, keys.post(rank), value)
                watch.arrived(rank)
                channel.heard(rank)
                if posts[rank].kind == ERROR and failed_at is None:
                    failed_at = time.monotonic()
            _observe(channel, keys, watch, {rank: view.signs.get(rank) for rank in asked})
            events.publish_waiting(
                meeting.operation,
                meeting.phase,
                meeting.world_size,
                lambda: {rank: amounts(watch.sign(rank)) for rank in watch.ranks},
            )
            silent = watch.silent(meeting.deadline)
            # After a failed post the meeting fails. The other ranks have one deadline to add their causes.
            late = failed_at is not None and time.monotonic() - failed_at >= meeting.deadline
            if watch.ranks and (silent or late):
                error: ShardproofError
                if failed_at is not None:
                    error = _failure(channel, meeting, keys, posts, silent)
                else:
                    error = _silence(channel, meeting, watch, silent, keys)
                verdict = meeting.record(
                    GIVEN_UP,
                    pack_error(error),
                    readers=len(posts) - 1,
                    renew=0 if _needs_new_generation(channel, keys, watch, silent) else None,
                )
                return channel.propose(keys, verdict, pack_error(error))
    finally:
        channel.release(waiting, keys.ready)
    for rank, record in posts.items():
        if record.parts:
            posts[rank] = _read_parts(channel, meeting, keys.post(rank), record)
    return posts


def _read_post(meeting: Meeting, key: str, value: bytes) -> Record:
    """The record that a rank posted. Wrong bytes count as the failure of that rank."""
    try:
        record = unpack(key, value)
        if record.kind not in (BYTES, ERROR):
            raise WrongBytes(key, f"a post, not a record of kind {record.kind!r}", value)
        return record
    except WrongBytes as wrong:
        return _as_failed(meeting, wrong)


def _read_parts(channel: Channel, meeting: Meeting, key: str, record: Record) -> Record:
    """The same post, with its parts read and joined."""
    try:
        return Record(record.operation, record.phase, record.kind, channel.body(key, record))
    except WrongBytes as wrong:
        return _as_failed(meeting, wrong)


def _as_failed(meeting: Meeting, wrong: WrongBytes) -> Record:
    text = meeting_errors.cause_text(wrong)
    return Record(meeting.operation, meeting.phase, ERROR, text.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The decision of the coordinator: an error, one answer, or one answer per rank."""

    error: ShardproofError | None = None
    cause: BaseException | None = None
    answer: bytes = b""
    answers: tuple[bytes, ...] | None = None


def _conclude(channel: Channel, meeting: Meeting, posts: Mapping[int, Record], decide: Decide) -> _Outcome:
    causes = {rank: post.body.decode(errors="replace") for rank, post in posts.items() if post.kind == ERROR}
    if causes:
        phase = posts[min(causes)].phase
        return _Outcome(meeting_errors.failure(meeting.operation, phase, meeting.world_size, causes))
    purposes = {rank: (post.operation, post.phase) for rank, post in posts.items()}
    if len(set(purposes.values())) > 1:
        return _Outcome(meeting_errors.disagreement(purposes))
    channel.heartbeat.decide(True)
    try:
        answer = decide([posts[rank].body for rank in range(meeting.world_size)])
        if isinstance(answer, bytes | bytearray | memoryview):
            return _Outcome(answer=bytes(answer))
        answers = tuple(bytes(one) for one in answer)
        if len(answers) != meeting.world_size:
            raise ValueError(f"{len(answers)} answers for {meeting.world_size} ranks")
        return _Outcome(answers=answers)
    except ShardproofError as error:
        return _Outcome(error=error, cause=error)
    except BaseException as error:
        causes = {0: meeting_errors.cause_text(error)}
        return _Outcome(
            meeting_errors.failure(meeting.operation, meeting.phase, meeting.world_size, causes), error
        )
    finally:
        channel.heartbeat.decide(False)


def _publish(channel: Channel, meeting: Meeting, keys: MeetingKeys, outcome: _Outcome) -> tuple[bytes, bytes]:
    """The verdict that this rank proposes, and the verdict that stands."""
    if outcome.error is not None:
        kind, body = ERROR, pack_error(outcome.error)
    elif outcome.answers is not None:
        kind, body = EACH, b""
        others = enumerate(outcome.answers[1:], start=1)
        channel.write_answers(keys, ((rank, meeting.record(ALL, one), one) for rank, one in others))
    else:
        kind, body = ALL, outcome.answer
    ours = meeting.record(kind, body, readers=meeting.world_size - 1)
    return ours, channel.propose(keys, ours, body) if meeting.world_size > 1 else ours


def _answer(channel: Channel, meeting: Meeting, keys: MeetingKeys, verdict: bytes) -> bytes:
    """This rank's answer in a verdict, or the error that the verdict carries."""
    channel.heard(0)
    key, record = keys.verdict, unpack(keys.verdict, verdict)
    readers = record.readers
    if record.kind == GIVEN_UP:
        is_same = record.operation_position == meeting.operation_position
        if record.renew is not None:
            # A new coordinator has not seen this meeting. With this verdict, no rank is ahead of it.
            carries = record.renew > 0 and is_same and not record.parts
            carried = meeting.record(GIVEN_UP, record.body) if carries else None
            channel.leave(meeting.number, carried)
        if not is_same:
            raise MeetingGivenUp
    else:
        channel.sweep(meeting.number)
    if record.kind == EACH:
        key = keys.answer(channel.rank)
        record = unpack(key, channel.read(key))
    if record.kind not in (ALL, ERROR, GIVEN_UP):
        raise WrongBytes(key, f"an answer, not a record of kind {record.kind!r}", verdict)
    body = channel.body(key, record)
    if readers > 0 and channel.rank != 0:
        channel.acknowledge(keys, readers)
    if record.kind in (ERROR, GIVEN_UP):
        raise unpack_error(key, body)
    return body


def _observe(channel: Channel, keys: MeetingKeys, watch: Watch, signs: Mapping[int, bytes | None]) -> None:
    watch.step(time.monotonic())
    for rank, sign in signs.items():
        if watch.observe(rank, sign, is_elsewhere=is_elsewhere(sign, keys.number)):
            channel.heard(rank)


def _needs_new_generation(channel: Channel, keys: MeetingKeys, watch: Watch, ranks: Iterable[int]) -> bool:
    """True if the ranks must join a new generation after this meeting, and count meetings from its start."""
    apart = any(is_elsewhere(watch.sign(rank), keys.number) for rank in ranks)
    return channel.needs_new_generation(keys) or apart


def _silence(
    channel: Channel, meeting: Meeting, watch: Watch, ranks: Iterable[int], keys: MeetingKeys | None = None
) -> RankSilent:
    ranks = list(ranks)
    return meeting_errors.silence(
        meeting.operation,
        meeting.phase,
        meeting.world_size,
        meeting.deadline,
        {rank: channel.last_heard(rank) for rank in ranks},
        {rank: describe(watch.sign(rank), None if keys is None else keys.number) for rank in ranks},
    )


def _failure(
    channel: Channel, meeting: Meeting, keys: MeetingKeys, posts: Mapping[int, Record], silent: Iterable[int]
) -> RankFailure:
    failed = {rank: post for rank, post in posts.items() if post.kind == ERROR}
    causes = {
        rank: _read_parts(channel, meeting, keys.post(rank), post).body.decode(errors="replace")
        for rank, post in failed.items()
    }
    phase = failed[min(failed)].phase
    return meeting_errors.failure(meeting.operation, phase, meeting.world_size, causes, silent)


def _as_post(post: bytes | BaseException) -> tuple[str, bytes]:
    if isinstance(post, BaseException):
        return ERROR, meeting_errors.cause_text(post).encode("utf-8", "replace")
    return BYTES, bytes(post)
