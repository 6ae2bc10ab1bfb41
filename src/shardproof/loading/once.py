"""Reading once and handing on: the rounds, in which one rank follows the orders that the leader made.

    for each round:  read and verify units, and pack  ->  wait for the round before, and place it
                     ->  did any rank fail?  ->  start the exchange

While an exchange is under way the next units are read. What a rank receives was verified by the rank that
read it; on its way it is protected as all tensors of the training are.
"""

from __future__ import annotations

from collections.abc import Callable

from shardproof.loading.exchange import Exchange, Underway
from shardproof.loading.once_receive import Receiver
from shardproof.loading.once_send import Sender

__all__ = ["PeerFailed", "hand_on"]


class PeerFailed(Exception):
    """Another rank failed, so all left the exchange together. That rank says why."""


def hand_on(
    make: Callable[[], tuple[Sender, Receiver]],
    rounds: int,
    exchange: Exchange,
    moved: Callable[[int], None],
) -> tuple[int, int]:
    """Reads, sends, receives and places what several ranks want. Called by every rank, for the same rounds.

    A rank that fails goes on to the next point where all leave: nobody waits for it in an exchange.

    Args:
        make: makes this rank's two sides.
        rounds: of exchange, the same on all ranks; 0 does nothing.
        exchange: over all ranks.
        moved: called with bytes read, sent or received since the call before.

    Returns:
        Bytes read and bytes received.

    Raises:
        CorruptChunkError, StorageError: what stopped this rank.
        PeerFailed: another rank was stopped.
    """
    if not rounds:
        return 0, 0
    error: BaseException | None = None
    underway: Underway | None = None
    sender: Sender | None = None
    receiver: Receiver | None = None
    try:
        sender, receiver = make()
    except BaseException as caught:
        error = caught
    for number in range(rounds + 1):
        try:
            if error is None and sender is not None and number < rounds:
                moved(sender.pack(number))
        except BaseException as caught:
            error = caught
        if underway is not None:
            underway.wait()
        try:
            if error is None and receiver is not None and number:
                moved(receiver.place(number - 1))
        except BaseException as caught:
            error = caught
        if number < rounds and exchange.any_failed(error is not None) and error is None:
            raise PeerFailed
        if error is not None:
            raise error
        assert sender is not None and receiver is not None
        if number < rounds:
            underway = exchange.start(
                sender.buffer(number), sender.sizes[number], receiver.buffer, receiver.sizes[number]
            )
    assert sender is not None and receiver is not None
    return sender.read, receiver.received
