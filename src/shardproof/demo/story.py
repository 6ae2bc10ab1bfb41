"""The demo's story: which runs there are, in which order, and which step each starts from and ends at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardproof.demo.layout import Layout

__all__ = ["LOSS_TOLERANCE", "Story"]

LOSS_TOLERANCE = 1e-4
"""Relative difference of a loss that another layout may make: its float32 sums run in another order, and the
steps that follow let the last bits grow. A tensor in the wrong place, or a step repeated, makes far more."""

KILLED_IN_SAVE = 3
"""The save that is cut short: two are committed by then."""

BATCH = 12
"""Windows in a step's batch; more ranks than that cannot share it."""


@dataclass(frozen=True, slots=True)
class Story:
    """Sizes of the demo.

    >>> story = Story(Layout(4), resume_ranks=(3, 1), steps=24, save_every=4)
    >>> story.restored_step, story.killed_step, story.stops
    (8, 12, (16, 24))
    """

    layout: Layout
    """Of the runs before the accident, and of the resume on the same layout."""
    resume_ranks: tuple[int, ...]
    steps: int
    save_every: int

    @classmethod
    def of(
        cls,
        ranks: int,
        resume_ranks: Sequence[int],
        steps: int,
        save_every: int,
        *,
        optimizer: str = "adamw",
        sharding: str = "fsdp2",
    ) -> Story:
        """The story of these sizes.

        Raises:
            ValueError: they do not make one.
        """
        most = BATCH
        for count in (ranks, *resume_ranks):
            if not 1 <= count <= most:
                raise ValueError(f"{count} ranks: the demo runs on 1 to {most} ranks")
        least = save_every * (2 + max(1, len(resume_ranks)))
        if save_every < 1 or steps % save_every or steps < least:
            raise ValueError(
                f"{steps} steps, a save after every {save_every}: give a multiple of that, at least {least}, "
                f"so that two saves, one cut short and {len(resume_ranks)} resumed runs find their place"
            )
        layout = Layout.of(ranks, sharding, optimizer).widest()
        return cls(layout, tuple(resume_ranks), steps, save_every)

    @property
    def resume_layouts(self) -> tuple[Layout, ...]:
        """Of each run on other ranks. The hybrid optimizer's CPU share changes too: all, none, all, ...

        >>> story = Story.of(4, (3, 1), 24, 4, optimizer="hybrid", sharding="flat")
        >>> [f"{layout}: {layout.method}" for layout in story.resume_layouts]
        ['3 ranks, flat: hybrid, 100% on CPU', '1 rank: hybrid, 0% on CPU']
        """
        return tuple(
            replace(self.layout, data=ranks, tensor=1, cpu_fraction=float(part % 2 == 0))
            for part, ranks in enumerate(self.resume_ranks)
        )

    @property
    def killed_step(self) -> int:
        """The step whose save is cut short."""
        return self.save_every * KILLED_IN_SAVE

    @property
    def restored_step(self) -> int:
        """The step of the last save before it."""
        return self.save_every * (KILLED_IN_SAVE - 1)

    @property
    def stops(self) -> tuple[int, ...]:
        """Last step of each run on another layout; each resumes from the one before."""
        parts = len(self.resume_ranks)
        saves = self.steps // self.save_every - (KILLED_IN_SAVE - 1)
        return tuple(
            self.restored_step + self.save_every * (saves * (part + 1) // parts) for part in range(parts)
        )
