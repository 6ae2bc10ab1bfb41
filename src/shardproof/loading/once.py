"""Reading once and handing on: the rounds, in which one rank follows the orders that the leader made.

    for each round:  read and verify units  ->  wait for the round before, and place it
                     ->  did any rank fail?  ->  start to hand on

While a round is handed on the next units are read. What a rank receives was verified by the rank that read
it; on its way it is protected as all tensors of the training are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shardproof.loading.exchange import Exchange, Underway
from shardproof.loading.once_receive import Receiver
from shardproof.loading.once_send import Sender

__all__ = ["Handing", "OverGroup", "PeerFailed", "hand_on"]


class PeerFailed(Exception):
    """Another rank failed, so all left together. That rank says why."""


class Handing(Protocol):
    """One rank's part of handing on."""

    @property
    def read(self) -> int:
        """Bytes read so far."""

    @property
    def received(self) -> int:
        """Bytes placed so far that another rank read."""

    def prepare(self, number: int) -> int:
        """Reads and verifies what a round begins; the bytes moved."""

    def start(self, number: int) -> None:
        """Begins to hand on a round that all ranks have prepared."""

    def wait(self) -> None:
        """Returns when the round that was started has arrived."""

    def place(self, number: int) -> int:
        """Puts what arrived in a round where it belongs; the bytes moved."""


def hand_on(
    make: Callable[[], Handing],
    rounds: int,
    any_failed: Callable[[bool], bool],
    moved: Callable[[int], None],
) -> tuple[int, int]:
    """Reads, hands on and places what several ranks want. Called by every rank, for the same rounds.

    A rank that fails goes on to the next point where all leave: nobody waits for it in an exchange.

    Args:
        make: makes this rank's part.
        rounds: the same on all ranks; 0 does nothing.
        any_failed: says whether any rank failed, the same on all, once all have asked.
        moved: called with bytes read, sent or placed since the call before.

    Returns:
        Bytes read and bytes received.

    Raises:
        CorruptChunkError, StorageError: what stopped this rank.
        PeerFailed: another rank was stopped.
    """
    if not rounds:
        return 0, 0
    error: BaseException | None = None
    handing: Handing | None = None
    try:
        handing = make()
    except BaseException as caught:
        error = caught
    for number in range(rounds + 1):
        try:
            if error is None and handing is not None and number < rounds:
                moved(handing.prepare(number))
        except BaseException as caught:
            error = caught
        if handing is not None:
            handing.wait()
        try:
            if error is None and handing is not None and number:
                moved(handing.place(number - 1))
        except BaseException as caught:
            error = caught
        if number < rounds and any_failed(error is not None) and error is None:
            raise PeerFailed
        if error is not None:
            raise error
        assert handing is not None
        if number < rounds:
            handing.start(number)
    assert handing is not None
    return handing.read, handing.received


class OverGroup:
    """Handing on over a process group: messages are packed, sent and unpacked.

    Args:
        sender: what this rank reads for others.
        receiver: what others read for this rank.
        exchange: over all ranks.
    """

    def __init__(self, sender: Sender, receiver: Receiver, exchange: Exchange) -> None:
        self._sender = sender
        self._receiver = receiver
        self._exchange = exchange
        self._underway: Underway | None = None

    @property
    def read(self) -> int:
        """Bytes read so far."""
        return self._sender.read

    @property
    def received(self) -> int:
        """Bytes placed so far that another rank read."""
        return self._receiver.received

    def prepare(self, number: int) -> int:
        """Reads and verifies what a round begins, and packs its messages."""
        return self._sender.pack(number)

    def start(self, number: int) -> None:
        """Begins the exchange of a round."""
        sender, receiver = self._sender, self._receiver
        self._underway = self._exchange.start(
            sender.buffer(number), sender.sizes[number], receiver.buffer, receiver.sizes[number]
        )

    def wait(self) -> None:
        """Returns when the exchange is over."""
        if self._underway is not None:
            self._underway.wait()
            self._underway = None

    def place(self, number: int) -> int:
        """Unpacks what was received."""
        return self._receiver.place(number)
