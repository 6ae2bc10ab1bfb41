"""How a resumed Lightning run continues with the batches of its data loaders.

Lightning 2.6 gives each loader its state and makes its iterator. Four things differ from a run without the
restart, and this module mends them:

- The iterator is made before the sampler knows its epoch, so a `DistributedSampler` shuffles for epoch 0.
- A loader does not get its state if the save followed the last batch and the other hooks of an epoch.
- A loader that is restored after its last batch has no batches left. Lightning counts an epoch without steps.
- An iterator may draw random numbers when it is made. Within an epoch, that was before the save.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import shardproof as sp

_log = logging.getLogger("shardproof")


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Gives the samplers of a loader the epoch, before an iterator of the loader is made."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def continue_batches(fit_loop: Any, random: dict[str, Any] | None) -> None:
    """Makes the first epoch of a resumed run continue with the batch after the save.

    Called when Lightning has restored the loaders and made their iterators, before the first batch.

    Args:
        fit_loop: the loop of the trainer. Its state is restored.
        random: the random state of the checkpoint; None if it has none.
    """
    loader = fit_loop._combined_loader
    if states := fit_loop._combined_loader_states_to_load:  # Lightning skipped them
        fit_loop._combined_loader_states_to_load = []
        loader._load_state_dicts(states)
        _restore(random)
        iter(fit_loop._data_fetcher)
    if fit_loop.epoch_loop.batch_progress.is_last_batch:
        batches = loader._iterator  # Lightning's, with an iterator for each loader
        batches.iterators = [
            _FirstEpoch(iterator, of, random)
            for iterator, of in zip(batches.iterators, loader.flattened, strict=True)
        ]
        return
    _restore(random)
    if fit_loop.max_batches == float("inf") and any(hasattr(of, "state_dict") for of in loader.flattened):
        _log.warning(
            "this run skips a batch: Lightning fetches one batch ahead of training from a data loader without"
            " a length, so the saved position of the loader is behind that batch. Give the dataset of the"
            " loader a __len__, or the trainer limit_train_batches=NUMBER"
        )


def _restore(random: dict[str, Any] | None) -> None:
    if random is not None:
        sp.RandomState().load_state_dict(random)


class _FirstEpoch:
    """The batches of a loader that was restored at the end of an epoch.

    A loader whose state is the position after the last batch has none left. Then the batches are those of its
    next iterator, which begins the next epoch.
    """

    def __init__(self, batches: Iterator[Any], loader: Any, random: dict[str, Any] | None) -> None:
        self._batches = batches
        self._loader = loader
        self._random = random
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begun, self._begun = self._begun, True
        try:
            return next(self._batches)
        except StopIteration:
            if begun:
                raise
        _restore(self._random)
        self._batches = iter(self._loader)
        return next(self._batches)
