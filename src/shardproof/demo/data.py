"""The demo's data: windows of a text, in an order that can be resumed and that no layout changes.

The batch of a step is a function of the seed and the step alone. A rank takes its rows of that batch, so runs
on different numbers of ranks see the same bytes at the same step, and their losses can be compared.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TextLoader"]


class TextLoader:
    """Shuffled windows of a text, epoch after epoch.

    Args:
        text: the bytes to train on.
        batch: windows in the batch of a step, over all ranks.
        length: predicted bytes in a window.
        rows: ``(part, parts)``: this rank takes the part-th of so many nearly equal parts of each batch.
        seed: of the order.

    The state is that of the whole job, equal on all ranks: seed, windows handed out, and a digest of the
    text, since a position means nothing in another text.

    >>> loader = TextLoader(bytes(range(200)), batch=2, length=8)
    >>> _ = loader.next()
    >>> resumed = TextLoader(bytes(range(200)), batch=2, length=8, seed=5)
    >>> resumed.load_state_dict(loader.state_dict())
    >>> bool((resumed.next()[0] == loader.next()[0]).all())
    True
    """

    def __init__(
        self, text: bytes, *, batch: int, length: int, rows: tuple[int, int] = (0, 1), seed: int = 0
    ) -> None:
        self._bytes = np.frombuffer(text, dtype=np.uint8)
        self._windows = (len(text) - 1) // length
        if self._windows < batch:
            raise ValueError(
                f"the text has {len(text)} bytes, too few for one batch of {batch} windows of {length + 1} "
                f"bytes: give one of at least {batch * length + 1}"
            )
        self._batch = batch
        self._length = length
        part, parts = rows
        self._rows = range(part * batch // parts, (part + 1) * batch // parts)
        self._digest = hashlib.sha256(text).hexdigest()
        self._seed = seed
        self._taken = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """This rank's rows of the next batch: bytes and the bytes that follow them, int64 (rows, length)."""
        starts = np.array([self._start(self._taken + row) for row in self._rows], dtype=np.int64)
        self._taken += self._batch
        window = self._bytes[starts[:, None] + np.arange(self._length + 1)]
        both = torch.from_numpy(window.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands."""
        return {"seed": self._seed, "taken": self._taken, "text": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another loader stood."""
        if state["text"] != self._digest:
            raise ValueError(
                f"the saved position is in another text (digest {state['text'][:12]}) than this loader's "
                f"({self._digest[:12]}): resume with the text that the run was started with"
            )
        self._seed = state["seed"]
        self._taken = state["taken"]

    def _start(self, window: int) -> int:
        epoch, index = divmod(window, self._windows)
        return int(self._order(epoch)[index]) * self._length

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self._seed, epoch)).permutation(self._windows)
