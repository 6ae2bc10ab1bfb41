"""Events as log records."""

from __future__ import annotations

import io
import json
import logging

import pytest

from shardproof import events


def test_each_phase_has_one_record_with_machine_readable_facts(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("my.saves")
    with caplog.at_level(logging.DEBUG, "my.saves"), events.log_to(logger, logging.DEBUG):
        with events.phase("save runs/a", "write", rank=3, world_size=4, step=7) as phase:
            phase.progress(1000, 1000)
            phase.note(files=2, name="clashes with an attribute of a record")
        with pytest.raises(OSError, match="full"), events.phase("save runs/a", "commit", step=7):
            raise OSError("full")
    written, failed = caplog.records
    assert (written.levelno, failed.levelno) == (logging.DEBUG, logging.ERROR)
    assert written.getMessage().startswith("rank 3: save runs/a: write 1.00 kB in ")
    facts = written.shardproof  # type: ignore[attr-defined]
    assert (facts["rank"], facts["world_size"], facts["step"], facts["bytes"]) == (3, 4, 7, 1000)
    assert facts["files"] == 2 and facts["bytes_per_second"] == pytest.approx(1000 / facts["seconds"])
    assert failed.shardproof["error"] == "OSError: full"  # type: ignore[attr-defined]


def test_the_json_formatter_writes_one_document_a_line() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(events.JsonFormatter())
    logger = logging.Logger("saves")
    logger.addHandler(handler)
    with events.log_to(logger), events.phase("save a", "write", step=7) as phase:
        phase.note(path=logging)  # not JSON: shown as text
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("other %s", "things")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["phase"], first["step"], first["level"], first["logger"]) == ("write", 7, "INFO", "saves")
    assert second["message"] == "other things" and "ValueError: inner" in second["exception"]
