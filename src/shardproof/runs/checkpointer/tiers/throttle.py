"""Bounds the bytes a second that a rank sends."""

from __future__ import annotations

import time
from collections.abc import Callable

_SLICE = 0.5
"""Seconds between two signs of life during a wait."""


class Throttle:
    """Spreads bytes evenly over time. An idle time gives no credit for later.

    Any t seconds see at most ``rate * t`` bytes and the bytes of one call of `take`.

    Example:
        >>> now = [0.0]
        >>> throttle = Throttle(10.0, clock=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
        >>> for _ in range(3):
        ...     throttle.take(20)
        >>> now
        [4.0]
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free = clock()
        """When the bytes that were taken are sent at the rate."""

    def take(self, count: int, waiting: Callable[[], None] = lambda: None) -> None:
        """Waits until `count` more bytes may be sent.

        Args:
            count: number of bytes.
            waiting: called at least every half second of the wait.
        """
        if self.rate is None:
            return
        while (left := self._free - self._clock()) > 0:
            waiting()
            self._sleep(min(left, _SLICE))
        self._free = max(self._free, self._clock()) + count / self.rate
