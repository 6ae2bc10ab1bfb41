"""Prometheus, TensorBoard and OpenTelemetry, with the real libraries where they are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardproof import events
from shardproof.events import tensorboard


def some_saves() -> None:
    for step in (10, 20):
        with events.phase("save run/s", "write", step=step) as phase:
            phase.progress(2_000_000, 2_000_000)
        with events.phase("save run/s", "commit", step=step):
            pass
    with pytest.raises(OSError, match="full"), events.phase("save run/s", "write", step=30):
        raise OSError("full")
    with events.phase("load run/s", "read") as phase:
        phase.progress(1_000, 1_000)


def test_prometheus_metrics() -> None:
    client = pytest.importorskip("prometheus_client")
    from shardproof.events import prometheus

    registry = client.CollectorRegistry()
    with prometheus.export(registry):
        some_saves()
    some_saves()  # after the export ended

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(f"shardproof_{name}", labels)

    write = {"action": "save", "phase": "write"}
    assert value("phase_seconds_count", **write) == 2
    assert value("phase_seconds_sum", **write) > 0
    assert value("bytes_total", **write) == 4_000_000
    assert value("bytes_per_second", **write) > 0
    assert value("failures_total", **write, error="OSError") == 1
    assert value("last_committed_step") == 20
    assert value("last_commit_timestamp_seconds") > 1.7e9
    assert value("bytes_total", action="load", phase="read") == 1_000
    assert value("progress_ratio", action="load", phase="read") == 1.0
    text = client.generate_latest(registry).decode()
    assert "shardproof_phase_seconds_bucket" in text
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus.export(registry)


def test_tensorboard_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with tensorboard.write_to(writer):
        some_saves()
    writer.close()
    found = EventAccumulator(str(tmp_path)).Reload()

    def steps(tag: str) -> list[int]:
        return [scalar.step for scalar in found.Scalars(f"shardproof/{tag}")]

    assert steps("save/write/seconds") == [10, 20]
    assert steps("save/commit/seconds") == [10, 20]
    assert steps("save/write/failed") == [30]
    assert steps("load/read/GB_per_second") == [0]
    assert [scalar.value for scalar in found.Scalars("shardproof/save/write/GB")] == [
        pytest.approx(0.002),
        pytest.approx(0.002),
    ]


def test_operations_without_a_step_are_counted() -> None:
    added: list[tuple[str, int]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None) -> None:
            added.append((tag, global_step))

    with tensorboard.write_to(Writer()):
        for _ in range(3):
            with events.phase("load a", "read"):
                pass
    assert added == [("shardproof/load/read/seconds", number) for number in range(3)]


def test_the_core_needs_none_of_the_libraries() -> None:
    script = (
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "sys.modules['tensorboard'] = None\n"
        "sys.modules['opentelemetry'] = None\n"
        "import shardproof as sp\n"
        "sp.events.show; sp.events.trace; sp.events.log_to\n"
        "import shardproof.events.tensorboard\n"
        "from shardproof.events import otel, prometheus\n"
        "for exporter in (otel, prometheus):\n"
        "    try:\n"
        "        exporter.export()\n"
        "    except ImportError:\n"
        "        continue\n"
        "    raise AssertionError(f'{exporter} found its library')\n"
        "assert not {'rich', 'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
