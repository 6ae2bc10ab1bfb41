"""Events as records of `logging`."""

from __future__ import annotations

import json
import logging
from typing import Any

from shardproof.engine.events.display import finished
from shardproof.engine.events.phases import Event, Subscription, hub


def log_to(logger: logging.Logger, level: int = logging.INFO) -> Subscription:
    """Logs one record for each phase that ends on this rank. A phase that failed is logged as an error.

    The message is for people. The record's attribute `shardproof` has the same facts as a dict (see
    `facts_of`), which a formatter such as `JsonFormatter` may print.

    Args:
        logger: gets the records.
        level: the level of phases that did not fail.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    >>> import sys
    >>> from shardproof import events
    >>> logger = logging.Logger("saves")
    >>> logger.addHandler(logging.StreamHandler(sys.stdout))
    >>> with events.log_to(logger), events.phase("save runs/a", "write", rank=3, world_size=4, step=7):
    ...     pass  # doctest: +ELLIPSIS
    rank 3: save runs/a: write in ... ms
    """

    def log(event: Event) -> None:
        if event.kind in ("end", "failed"):
            logger.log(
                logging.ERROR if event.kind == "failed" else level,
                "rank %d: %s",
                event.rank,
                finished(event),
                extra={"shardproof": facts_of(event)},
            )

    return hub.subscribe(log)


def facts_of(event: Event) -> dict[str, Any]:
    """The fields and the facts of an event, as plain values.

    >>> event = Event("end", "save a", "write", 0, 4, 7, 1e9, 0.0, "main", 2.0, 10**9, 10**9, {"files": 1})
    >>> facts = facts_of(event)
    >>> facts["phase"], facts["bytes"], facts["bytes_per_second"], facts["files"]
    ('write', 1000000000, 500000000.0, 1)
    """
    facts: dict[str, Any] = {
        **event.facts,
        "kind": event.kind,
        "operation": event.operation,
        "phase": event.phase,
        "rank": event.rank,
        "world_size": event.world_size,
        "step": event.step,
        "time": event.time,
        "thread": event.thread,
        "seconds": event.seconds,
        "bytes": event.done,
        "bytes_per_second": event.done / max(event.seconds, 1e-9),
    }
    if event.error is not None:
        facts["error"] = event.error
    return facts


class JsonFormatter(logging.Formatter):
    """Formats any record as one line of JSON: time, level, logger, message, and the facts of an event.

    >>> record = logging.makeLogRecord({"name": "saves", "levelname": "INFO", "msg": "done", "created": 5.0})
    >>> JsonFormatter().format(record)
    '{"time": 5.0, "level": "INFO", "logger": "saves", "message": "done"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "shardproof", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
