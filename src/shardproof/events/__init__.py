"""What a save or load does, as it happens: for logs, terminals, traces and dashboards.

Every operation is a sequence of phases on each rank. A listener is called with each phase's begin, progress
and end. Without a listener a phase costs microseconds.

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

from shardproof.events.display import Bars, show
from shardproof.events.logs import JsonFormatter, facts_of, log_to
from shardproof.events.phase_table import PHASES, KnownPhase
from shardproof.events.phases import Event, Hub, Listener, Phase, Subscription, hub
from shardproof.events.trace_files import trace
from shardproof.events.trace_merge import Merged, merge_traces

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
    "heard",
    "log_to",
    "merge_traces",
    "phase",
    "show",
    "subscribe",
    "trace",
]


def phase(operation: str, name: str, *, rank: int = 0, world_size: int = 1, step: int | None = None) -> Phase:
    """A phase of an operation on this rank, as a context. An exception that ends it is told and passes on.

    Args:
        operation: what is done and where, a verb and a place: ``"save runs/gpt/step-00001000"``.
        name: the part of it: ``"write"``.
        rank: of this process.
        world_size: number of ranks.
        step: of the run, if there is one.

    >>> with phase("load runs/a", "read") as reading:
    ...     reading.progress(512, 2048)
    """
    return hub.phase(operation, name, rank=rank, world_size=world_size, step=step)


def subscribe(listener: Listener) -> Subscription:
    """Calls `listener(event)` with every event from now on, until the result is called or left as a context.

    It is called in the thread that saves or loads, so it should be quick; of one phase it gets at most ten
    progress events a second. One that raises is logged and gets no more events: it never breaks a save.

    >>> unsubscribe = subscribe(print)
    >>> unsubscribe()
    """
    return hub.subscribe(listener)


def heard(
    operation: str, phase: str, world_size: int, ranks: Callable[[], Mapping[int, tuple[int, int]]]
) -> None:
    """Tells listeners what this rank, while it waits for others, has heard of their progress.

    Args:
        operation: that they are all in.
        phase: that this rank waits in.
        world_size: number of ranks.
        ranks: gives the ranks still waited for, each with its bytes done and bytes in all; called only if
            somebody listens.

    >>> heard("save runs/a", "commit", 4, lambda: {3: (100, 200)})
    """
    hub.heard(operation, phase, world_size, ranks)
