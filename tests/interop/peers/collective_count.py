"""Counts the collectives that a peer's thread begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives", "without_collectives"]


class Collectives(TorchDispatchMode):
    """Counts the collectives of process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function._schema.name.partition("::")[2].rstrip("_")] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def without_collectives() -> Iterator[None]:
    """Fails at the end of the block if a collective ran in it."""
    with Collectives() as seen:
        yield
    assert not seen.counts, f"collectives ran: {dict(seen.counts)}"
