"""The tests that every storage must pass: subclass `StorageConformance` and provide a `storage` fixture.

These are the public names of `shardproof.engine.storage.conformance`.
"""

from __future__ import annotations

from shardproof.engine.storage.conformance import StorageConformance

__all__ = ["StorageConformance"]
