"""The saver that the saves of a framework share while the ranks stay the same."""

from __future__ import annotations

from shardproof.engine.rendezvous import Rendezvous
from shardproof.engine.saving import Saver


class LastSaver:
    """The saver of the last save. The next save of the same ranks reuses its plan, buffers and threads.

    With new buffers, a save in the background takes about twice as long to begin.

    Args:
        host_memory_budget: see `shardproof.Checkpointer`.
    """

    def __init__(self, host_memory_budget: int | None = None) -> None:
        self._budget = host_memory_budget
        self._last: tuple[Rendezvous, Saver] | None = None

    def at(self, rendezvous: Rendezvous, location: str) -> Saver:
        """The saver of these ranks. It waits for the last save of other ranks.

        Args:
            rendezvous: the rendezvous of the ranks.
            location: path of the checkpoint to save, for errors.

        Raises:
            ShardproofError: the last save failed, and no call has read its result. Every rank gets an error.
        """
        last = self._last
        is_alone = rendezvous.world_size == 1  # each call of a process without a group has its own rendezvous
        if last is None or not (last[0] is rendezvous or (is_alone and last[0].world_size == 1)):
            if last is not None:
                with rendezvous.operation(f"save {location}"):
                    last[1].wait()
            last = self._last = rendezvous, Saver(rendezvous, host_memory_budget=self._budget)
        return last[1]
