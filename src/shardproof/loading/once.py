"""Reading once and handing on over a process group: the rounds, by the orders that the coordinator made.

    for each round:  read and verify units  ->  wait for the round before, and place it
                     ->  did any rank fail?  ->  start to hand on

While a round is handed on the next units are read. What a rank receives was verified by the rank that read
it; on its way it is protected as all tensors of the training are.
"""

from __future__ import annotations

from collections.abc import Callable

from shardproof.loading.read_once.group_collectives import Exchange, Underway
from shardproof.loading.once_receive import Receiver
from shardproof.loading.once_send import Sender

__all__ = ["PeerFailed", "through_group"]


class PeerFailed(Exception):
    """Another rank failed, so all left together. That rank says why."""


def through_group(
    make: Callable[[], tuple[Sender, Receiver]],
    exchange: Exchange,
    rounds: int,
    moved: Callable[[int], None],
) -> tuple[int, int]:
    """Reads, hands on and places what several ranks want. Called by every rank, for the same rounds.

    A rank that fails goes on to the next point where all leave: nobody waits for it in an exchange.

    Args:
        make: makes this rank's parts.
        exchange: over all ranks.
        rounds: the same on all ranks.
        moved: called with bytes read, sent or placed since the call before.

    Returns:
        Bytes read and bytes received.

    Raises:
        CorruptChunkError, StorageError: what stopped this rank.
        PeerFailed: another rank was stopped.
    """
    error: BaseException | None = None
    parts: tuple[Sender, Receiver] | None = None
    underway: Underway | None = None
    try:
        parts = make()
        exchange.reserve(len(parts[0].buffer(0)), len(parts[1].buffer))
    except BaseException as caught:
        error = caught
    for number in range(rounds + 1):
        try:
            if error is None and parts is not None and number < rounds:
                moved(parts[0].pack(number))
        except BaseException as caught:
            error = caught
        if underway is not None:
            underway.wait()
        try:
            if error is None and parts is not None and number:
                moved(parts[1].place(number - 1))
        except BaseException as caught:
            error = caught
        if number < rounds and exchange.any_failed(error is not None) and error is None:
            raise PeerFailed
        if error is not None:
            raise error
        assert parts is not None
        sender, receiver = parts
        if number < rounds:
            underway = exchange.start(
                sender.buffer(number), sender.sizes[number], receiver.buffer, receiver.sizes[number]
            )
    return sender.read, receiver.received
