"""Events of saves and loads, for logs, terminals, traces and dashboards.

These are the public names of `shardproof.engine.events`.
"""

from __future__ import annotations

from shardproof.engine.events import (
    PHASES,
    Bars,
    Event,
    Hub,
    JsonFormatter,
    KnownPhase,
    Merged,
    Phase,
    Subscription,
    facts_of,
    log_to,
    merge_traces,
    phase,
    publish_waiting,
    show,
    subscribe,
    trace,
)

__all__ = [
    "PHASES",
    "Bars",
    "Event",
    "Hub",
    "JsonFormatter",
    "KnownPhase",
    "Merged",
    "Phase",
    "Subscription",
    "facts_of",
    "log_to",
    "merge_traces",
    "phase",
    "publish_waiting",
    "show",
    "subscribe",
    "trace",
]
