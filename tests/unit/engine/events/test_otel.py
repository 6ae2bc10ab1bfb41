"""Spans and metrics of OpenTelemetry, with the exporters in memory of its SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof import events

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from shardproof.events import otel


class Collected:
    """What one export gave to the SDK."""

    def __init__(self) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._reader])

    def spans(self) -> list[ReadableSpan]:
        return sorted(
            self._spans.get_finished_spans(), key=lambda span: (span.start_time or 0, bool(span.parent))
        )

    def trees(self) -> list[tuple[str, list[str]]]:
        """The name of each operation that ended, and those of its phases."""
        spans = self.spans()
        inside = {span.context.span_id: [] for span in spans if span.parent is None}  # type: dict[int, list[str]]
        for span in spans:
            if span.parent is not None:
                inside.setdefault(span.parent.span_id, []).append(span.name)
        return [(span.name, inside[span.context.span_id]) for span in spans if span.parent is None]

    def points(self) -> dict[tuple[str, ...], Any]:
        """The points of all metrics, by name and attributes."""
        data = self._reader.get_metrics_data()
        assert data is not None
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return {
            (metric.name, *map(str, (point.attributes or {}).values())): point
            for metric in metrics
            for point in metric.data.data_points
        }


@pytest.fixture
def collected() -> Iterator[Collected]:
    found = Collected()
    with otel.export(found.tracers, found.meters):
        yield found


def test_metrics(collected: Collected) -> None:
    with events.phase("save run/s", "write", step=10) as phase:
        phase.progress(2_000_000, 2_000_000)
    with events.phase("save run/s", "commit", step=10):
        pass
    with pytest.raises(OSError, match="full"), events.phase("save run/s", "write", step=30):
        raise OSError("full")
    points = collected.points()
    assert points["shardproof.phase.duration", "save", "write"].count == 1
    assert points["shardproof.phase.duration", "save", "write"].sum > 0
    assert points["shardproof.io", "save", "write"].value == 2_000_000
    assert points["shardproof.io.speed", "save", "write"].value > 0
    assert points["shardproof.progress", "save", "commit"].value == 1.0
    assert points["shardproof.failures", "save", "write", "OSError"].value == 1
    assert points["shardproof.committed.step",].value == 10
    assert points["shardproof.committed.time",].value > 1.7e9


def test_a_save_and_a_load_are_a_span_each_with_their_phases(tmp_path: Path, collected: Collected) -> None:
    state = {"w": torch.ones(2), "epoch": 3}
    checkpointer = sp.Checkpointer(tmp_path, keep=sp.KeepLatest(1))
    for step in (1, 2):
        checkpointer.save(step, state).result()
    checkpointer.wait()
    checkpointer.restore(state)
    first, second, load = collected.trees()
    assert first[0] == second[0] == "save"
    assert set(first[1]) >= {"save blocked", "save collect", "save agree", "save write", "save commit"}
    assert "save retain" in second[1]
    assert load == ("load", ["load match", "load read", "load apply"])
    spans = {span.name: span for span in collected.spans()}
    save, commit = spans["save"], spans["save commit"]
    assert save.attributes is not None
    assert save.attributes["shardproof.step"] == 2
    assert save.attributes["shardproof.location"] == str(tmp_path / "step-00000002")
    assert save.attributes["shardproof.world_size"] == 1
    assert commit.end_time is not None
    assert (save.end_time or 0) >= commit.end_time
    assert spans["load read"].attributes is not None
    assert spans["load read"].attributes["shardproof.bytes"] == 8
    assert "shardproof.cache" in spans["load read"].attributes


def test_the_parent_is_the_span_of_the_caller(tmp_path: Path, collected: Collected) -> None:
    with collected.tracers.get_tracer("program").start_as_current_span("training step") as outer:
        sp.save(tmp_path / "a", {"w": torch.ones(2)})
    save = next(span for span in collected.spans() if span.name == "save")
    assert save.parent is not None
    assert save.parent.span_id == outer.get_span_context().span_id


def test_a_failure_is_an_error_of_phase_and_operation(collected: Collected) -> None:
    with pytest.raises(OSError, match="full"), events.phase("save run/s", "write", step=1):
        raise OSError("full")
    assert [(span.name, span.status.status_code) for span in collected.spans()] == [
        ("save", StatusCode.ERROR),
        ("save write", StatusCode.ERROR),
    ]
    assert collected.spans()[0].status.description == "OSError: full"


def test_operations_without_a_certain_end_end_with_the_next(collected: Collected) -> None:
    for _ in range(2):  # loads without plain values
        for name in ("match", "read"):
            with events.phase("load run/a", name):
                pass
    assert collected.trees() == [("load", ["load match", "load read"])]
    with events.phase("save run/s1", "blocked"):  # a save that is skipped
        pass
    assert len(collected.trees()) == 2
    with events.phase("save run/s2", "blocked"), events.phase("save run/s2", "collect"):
        pass
    assert collected.trees()[2:] == [("save", ["save blocked"])]
    with events.phase("load run/b", "match"):  # the save is between two phases
        pass
    for name in ("write", "commit"):
        with events.phase("save run/s2", name):
            pass
    phases = [f"save {name}" for name in ("blocked", "collect", "write", "commit")]
    assert collected.trees()[3:] == [("save", phases), ("load", ["load match"])]


def test_phases_of_several_threads_belong_to_one_operation(collected: Collected) -> None:
    with events.phase("save run/s", "blocked"):

        def rest() -> None:
            for name in ("write", "commit"):
                with events.phase("save run/s", name):
                    pass

        thread = threading.Thread(target=rest)
        thread.start()
        thread.join(60)
        assert collected.trees() == [], "blocked is open"
    with events.phase("save run/s", "retain"):
        pass
    ((name, phases),) = collected.trees()
    assert (name, phases) == ("save", ["save blocked", "save write", "save commit", "save retain"])


def test_the_end_of_the_subscription_ends_all_spans() -> None:
    found = Collected()
    phase = events.phase("load run/a", "read")
    with events.phase("load run/b", "match"):
        subscription = otel.export(found.tracers, found.meters)
    with events.phase("load run/a", "match"):
        pass
    subscription.close()
    with phase:
        pass
    assert found.trees() == [("load", ["load match"])]


def test_the_last_phases_are_known() -> None:
    known = {(phase.operation, phase.name) for phase in events.PHASES if phase.in_events}
    from shardproof.engine.events.otel import _FOLLOWING, _LAST, _MAY_LACK_LAST

    assert known >= set(_LAST.items()) | _FOLLOWING
    assert _LAST.keys() >= _MAY_LACK_LAST
