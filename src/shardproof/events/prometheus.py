"""Metrics of this rank for Prometheus. Needs ``pip install 'shardproof[prometheus]'``.

These are the public names of `shardproof.engine.events.prometheus`.
"""

from __future__ import annotations

from shardproof.engine.events.prometheus import export

__all__ = ["export"]
