"""Spans and metrics of this rank for OpenTelemetry. Needs ``pip install 'shardproof[otel]'``.

These are the public names of `shardproof.engine.events.otel`.
"""

from __future__ import annotations

from shardproof.engine.events.otel import export

__all__ = ["export"]
