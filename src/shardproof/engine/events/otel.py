"""Spans and metrics of this rank for OpenTelemetry. Needs ``pip install 'shardproof[otel]'``.

Note: the span of an operation
------------------------------
Events have phases, and no end of an operation. So the span of an operation begins with its first phase. It
ends, with the time of the last end of a phase, once no phase is open, and a phase failed or the last phase
(`_LAST`) ended. Some operations have no certain last phase: a load without plain values has no ``apply``, and
a save that is skipped has only ``blocked``. They end when the next operation begins in their thread. A phase
that follows the last one, such as ``retain``, is a child of the ended span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardproof._utils import forks
from shardproof.engine.events.phases import Event, Subscription, hub
from shardproof.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["export"]

_LAST = {
    "convert": "publish",
    "copy": "read",
    "diff": "read",
    "load": "apply",
    "nodes": "copy",
    "save": "commit",
    "upload": "commit",
    "verify": "read",
}
"""The last phase of an action on every rank."""
_MAY_LACK_LAST = {"convert", "load"}
_FOLLOWING = {("save", "retain")}
"""Phases behind the last one."""
_KINDS = (str, bool, int, float)


def export(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> Subscription:
    """Makes spans and metrics of this process's saves and loads.

    Each operation is a span with the name of its action, such as ``save``. Its parent is the current span of
    the caller. Its attributes are ``shardproof.location``, ``shardproof.step``, ``shardproof.rank`` and
    ``shardproof.world_size``. Each phase is a child span, such as ``save write``, with the attribute
    ``shardproof.bytes`` and the facts of the phase, such as ``shardproof.cache``. A failed phase has the
    status of an error, and so has its operation. The metrics, with attributes in brackets:

    - ``shardproof.phase.duration`` [action, phase], histogram in seconds: time of phases that succeeded;
    - ``shardproof.io`` [action, phase], counter in bytes: bytes of phases that succeeded;
    - ``shardproof.io.speed`` [action, phase], gauge in bytes per second: speed of the last one;
    - ``shardproof.progress`` [action, phase], gauge: progress of a running phase, from 0 to 1;
    - ``shardproof.failures`` [action, phase, error.type], counter: phases that failed;
    - ``shardproof.committed.step`` and ``shardproof.committed.time``, gauges, in Unix seconds.

    Without a provider of the SDK, OpenTelemetry drops all of them.

    Args:
        tracer_provider: makes the tracer; None for the global one.
        meter_provider: makes the meter; None for the global one.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    exporter = _Exporter(tracer_provider, meter_provider)
    return hub.subscribe(exporter, exporter.close)


class _Operation:
    """The span of an operation, and those of its open phases."""

    def __init__(self, span: Span, first: Event) -> None:
        self.span = span
        self.thread_id = first.thread_id
        self.first = first.phase
        self.seen: set[str] = set()
        """Names of its phases."""
        self.phases: dict[int, Span] = {}
        """The span of each open phase, by its id."""
        self.is_last = False
        """True if no other phase follows, or one failed."""
        self.end = 0
        """Time of the last end of a phase, Unix nanoseconds."""

    def is_over(self, name: str, event: Event) -> bool:
        """True if the operation `name` ended before this phase began, without an event that says so."""
        is_next = event.operation != name or event.phase == self.first
        if self.phases or event.thread_id != self.thread_id or not is_next:
            return False
        action = name.partition(" ")[0]
        return action not in _LAST or action in _MAY_LACK_LAST or self.seen == {"blocked"}


class _Exporter:
    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        from opentelemetry import metrics, trace

        self._trace = trace
        self._tracer = trace.get_tracer("shardproof", __version__, tracer_provider)
        meter = metrics.get_meter("shardproof", __version__, meter_provider)
        self._seconds = meter.create_histogram(
            "shardproof.phase.duration", "s", "Time of phases that ended well"
        )
        self._bytes = meter.create_counter("shardproof.io", "By", "Bytes of phases that ended well")
        self._speed = meter.create_gauge("shardproof.io.speed", "By/s", "Speed of the last phase")
        self._ratio = meter.create_gauge("shardproof.progress", "1", "Progress of a phase under way")
        self._failures = meter.create_counter("shardproof.failures", "{phase}", "Phases that failed")
        self._step = meter.create_gauge("shardproof.committed.step", "{step}", "Step of the last commit")
        self._time = meter.create_gauge("shardproof.committed.time", "s", "Unix time of the last commit")
        self._lock = forks.lock()
        self._open: dict[str, _Operation] = {}
        """Operations that have not ended, by name."""
        self._ended: dict[str, tuple[str, _Operation]] = {}
        """The last ended operation of each action, with its name."""

    def __call__(self, event: Event) -> None:
        if event.kind == "waiting":
            return
        self._measure(event)
        with self._lock:
            if event.kind == "begin":
                self._begin(event)
            elif event.kind in ("end", "failed"):
                self._end(event)

    def close(self) -> None:
        """Ends the spans of all operations."""
        with self._lock:
            for name in list(self._open):
                self._finish(name)

    def _measure(self, event: Event) -> None:
        labels = {"action": event.action, "phase": event.phase}
        if event.kind in ("begin", "progress"):
            self._ratio.set(event.done / event.total if event.total else 0.0, labels)
        elif event.kind == "failed":
            self._failures.add(1, {**labels, "error.type": (event.error or "").partition(":")[0]})
        else:
            self._ratio.set(1.0, labels)
            self._seconds.record(event.seconds, labels)
            if event.done:
                self._bytes.add(event.done, labels)
                self._speed.set(event.done / max(event.seconds, 1e-9), labels)
            if (event.action, event.phase) == ("save", "commit"):
                self._time.set(event.time)
                if event.step is not None:
                    self._step.set(event.step)

    def _begin(self, event: Event) -> None:
        name, now = event.operation, int(event.time * 1e9)
        for other, candidate in list(self._open.items()):
            if candidate.is_over(other, event):
                self._finish(other)
        ended, operation = self._ended.get(event.action, ("", None))
        if (event.action, event.phase) not in _FOLLOWING or ended != name or operation is None:
            if name not in self._open:
                attributes = _attributes(
                    location=name.partition(" ")[2],
                    step=event.step,
                    rank=event.rank,
                    world_size=event.world_size,
                )
                span = self._tracer.start_span(event.action, start_time=now, attributes=attributes)
                self._open[name] = _Operation(span, event)
            operation = self._open[name]
        operation.seen.add(event.phase)
        operation.phases[event.id] = self._tracer.start_span(
            f"{event.action} {event.phase}",
            self._trace.set_span_in_context(operation.span),
            start_time=now,
        )

    def _end(self, event: Event) -> None:
        name, now = event.operation, int(event.time * 1e9)
        candidates = [self._open.get(name), self._ended.get(event.action, ("", None))[1]]
        operation = next((one for one in candidates if one is not None and event.id in one.phases), None)
        if operation is None:  # the phase began before the subscription
            return
        span = operation.phases.pop(event.id)
        span.set_attributes(_attributes(**{"bytes": event.done or None, **event.facts}))
        if event.kind == "failed":
            for failed in (span, operation.span):
                failed.set_status(self._trace.StatusCode.ERROR, event.error)
        span.end(now)
        operation.end = max(operation.end, now)
        operation.is_last |= event.kind == "failed" or _LAST.get(event.action) == event.phase
        if operation.is_last and not operation.phases and self._open.get(name) is operation:
            self._finish(name)

    def _finish(self, name: str) -> None:
        operation = self._open.pop(name)
        operation.span.end(operation.end or None)
        self._ended[name.partition(" ")[0]] = (name, operation)


def _attributes(**values: Any) -> dict[str, Any]:
    """The values that an attribute can have."""
    return {f"shardproof.{name}": value for name, value in values.items() if isinstance(value, _KINDS)}
