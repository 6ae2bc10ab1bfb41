"""Blocks so small that a test's chunks have several."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def blocks_of(nbytes: int) -> Iterator[None]:
    """Within it, all imported modules hash and read chunks in blocks of `nbytes`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("shardproof.") and "BLOCK_BYTES" in vars(module):
                patch.setattr(module, "BLOCK_BYTES", nbytes)
        yield
