"""A hub whose clocks stand still until the test moves them."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardproof.engine.events.phases import Hub
from shardproof.events import Event


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A hub, its clock, and what it published."""

    clock: Clock = field(default_factory=Clock)
    seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hub = Hub(self.clock, lambda: 1_000_000_000.0 + self.clock.now)
        self.hub.subscribe(self.seen.append)

    def kinds(self) -> list[tuple[str, str]]:
        return [(event.kind, event.phase) for event in self.seen]
