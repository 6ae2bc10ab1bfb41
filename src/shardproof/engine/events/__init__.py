"""Events of saves and loads, for logs, terminals, traces and dashboards.

On each rank, every operation is a sequence of phases (`PHASES`). A listener gets an event when a phase
begins, makes progress, and ends. Without a listener a phase costs microseconds.

>>> from shardproof import events
>>> seen = []
>>> with events.subscribe(seen.append), events.phase("save runs/a", "write", step=7) as phase:
...     phase.progress(1_000, 1_000)
...     phase.note(files=1)
>>> [(event.kind, event.done, event.facts) for event in seen]
[('begin', 0, {}), ('end', 1000, {'files': 1})]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardproof.engine.events.display import Bars, JsonFormatter, facts_of, log_to, show
from shardproof.engine.events.phases import PHASES, Event, Hub, KnownPhase, Listener, Phase, Subscription, hub
from shardproof.engine.events.trace_files import Merged, merge_traces, trace
from shardproof.engine.events.trace_files import blocked_seconds as blocked_seconds

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


def phase(operation: str, name: str, *, rank: int = 0, world_size: int = 1, step: int | None = None) -> Phase:
    """A phase of an operation on this rank, as a context. An exception ends it as failed, and passes on.

    Args:
        operation: a verb and a place: ``"save runs/gpt/step-00001000"``.
        name: the name of the phase: ``"write"``.
        rank: the rank of this process.
        world_size: the number of ranks.
        step: the step of the run, if there is one.

    Returns:
        The phase, which begins when the caller enters it.

    Example:
        >>> with phase("load runs/a", "read") as reading:
        ...     reading.progress(512, 2048)
    """
    return hub.phase(operation, name, rank=rank, world_size=world_size, step=step)


def subscribe(listener: Listener) -> Subscription:
    """Calls `listener(event)` with every event from now on.

    The call runs in the thread that saves or loads, so the listener should be quick. It gets at most ten
    progress events a second for one phase. If the listener raises, the error is logged and the subscription
    ends. A listener never breaks a save.

    Args:
        listener: gets each event.

    Returns:
        The subscription. It ends when the caller calls it, or leaves it as a context.

    Example:
        >>> unsubscribe = subscribe(print)
        >>> unsubscribe()
    """
    return hub.subscribe(listener)


def publish_waiting(
    operation: str, phase: str, world_size: int, ranks: Callable[[], Mapping[int, tuple[int, int]]]
) -> None:
    """Publishes the progress of the ranks for which this rank waits.

    Args:
        operation: the operation of all these ranks.
        phase: the phase in which this rank waits.
        world_size: the number of ranks.
        ranks: gives bytes done and bytes in all of each missing rank. Called only if there is a listener.

    Example:
        >>> publish_waiting("save runs/a", "commit", 4, lambda: {3: (100, 200)})
    """
    hub.publish_waiting(operation, phase, world_size, ranks)
