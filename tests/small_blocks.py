"""Blocks so small that a test's chunks have several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardproof.format import blocks
from shardproof.loading import blocks as loading_blocks
from shardproof.loading import chunks, place
from shardproof.saving import shard


@contextmanager
def blocks_of(nbytes: int) -> Iterator[None]:
    """Within it chunks are hashed and read in blocks of so many bytes, on saving and on loading."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, loading_blocks, chunks, place, shard):
            patch.setattr(module, "BLOCK_BYTES", nbytes)
        yield
