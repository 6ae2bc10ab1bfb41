"""Metrics of this rank for Prometheus. Needs ``pip install 'shardproof[prometheus]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof.engine.events.phases import Event, Subscription, hub

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["export"]

_SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


def export(registry: CollectorRegistry | None = None) -> Subscription:
    """Maintains metrics of this process's saves and loads.

    It does not serve them: serve the registry as for other metrics (`prometheus_client.start_http_server`,
    or a push). Prometheus distinguishes ranks by their instance. The metrics, with labels in brackets:

    - ``shardproof_phase_seconds`` [action, phase], histogram: time of phases that succeeded;
    - ``shardproof_bytes_total`` [action, phase], counter: bytes of phases that succeeded;
    - ``shardproof_bytes_per_second`` [action, phase], gauge: speed of the last one;
    - ``shardproof_progress_ratio`` [action, phase], gauge: progress of a running phase, from 0 to 1;
    - ``shardproof_failures_total`` [action, phase, error], counter: phases that failed, by the error's class;
    - ``shardproof_last_committed_step`` and ``shardproof_last_commit_timestamp_seconds``, gauges.

    Args:
        registry: the registry of the metrics; None for the client's default one.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    Raises:
        ImportError: prometheus-client is not installed.
        ValueError: the registry has these metrics already. Call `export` once a process.

    >>> from prometheus_client import CollectorRegistry
    >>> from shardproof import events
    >>> registry = CollectorRegistry()
    >>> with export(registry), events.phase("save runs/a", "write", step=7) as phase:
    ...     phase.progress(1_000, 1_000)
    >>> registry.get_sample_value("shardproof_bytes_total", {"action": "save", "phase": "write"})
    1000.0
    """
    return hub.subscribe(_Metrics(registry))


class _Metrics:
    def __init__(self, registry: CollectorRegistry | None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry = registry or REGISTRY
        where: dict[str, Any] = {"registry": registry, "labelnames": ("action", "phase")}
        self._seconds = Histogram(
            "shardproof_phase_seconds", "Time of phases that ended well", buckets=_SECONDS, **where
        )
        self._bytes = Counter("shardproof_bytes", "Bytes of phases that ended well", **where)
        self._speed = Gauge("shardproof_bytes_per_second", "Speed of the last phase", **where)
        self._ratio = Gauge("shardproof_progress_ratio", "Progress of a phase under way, 0 to 1", **where)
        self._failures = Counter(
            "shardproof_failures",
            "Phases that failed, by the class of the error",
            registry=registry,
            labelnames=("action", "phase", "error"),
        )
        self._step = Gauge("shardproof_last_committed_step", "Step of the last commit", registry=registry)
        self._committed = Gauge(
            "shardproof_last_commit_timestamp_seconds", "Unix time of the last commit", registry=registry
        )

    def __call__(self, event: Event) -> None:
        labels = (event.action, event.phase)
        if event.kind in ("begin", "progress"):
            self._ratio.labels(*labels).set(event.done / event.total if event.total else 0.0)
        elif event.kind == "failed":
            error = (event.error or "").partition(":")[0]
            self._failures.labels(*labels, error).inc()
        elif event.kind == "end":
            self._ratio.labels(*labels).set(1.0)
            self._seconds.labels(*labels).observe(event.seconds)
            if event.done:
                self._bytes.labels(*labels).inc(event.done)
                self._speed.labels(*labels).set(event.done / max(event.seconds, 1e-9))
            if labels == ("save", "commit"):
                self._committed.set(event.time)
                if event.step is not None:
                    self._step.set(event.step)
