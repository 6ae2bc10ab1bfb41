"""Checkpoints of a Lightning `Trainer`. Each rank saves its own part in the background.

`ShardproofCheckpoint` replaces Lightning's `ModelCheckpoint`, with the same arguments:

    from shardproof.frameworks.lightning import ShardproofCheckpoint

    trainer = Trainer(callbacks=[ShardproofCheckpoint(every_n_train_steps=1000)])
    trainer.fit(model, ckpt_path="last")

It works with `lightning` and with `pytorch_lightning`. If a program uses the latter, it imports
`pytorch_lightning` before this module.

After a load, a resumed run continues with the batches of its data loaders. Lightning 2.6 gives each loader
its state and makes its iterator. Four things differ from a run without the restart, and this module mends
them:

- The iterator is made before the sampler knows its epoch, so a `DistributedSampler` shuffles for epoch 0.
- A loader does not get its state if the save followed the last batch and the other hooks of an epoch.
- A loader that is restored after its last batch has no batches left. Lightning counts an epoch without steps.
- An iterator may draw random numbers when it is made. Within an epoch, that was before the save.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import shardproof as sp
from shardproof.frameworks.shared.folder_saves import (
    FolderSaves,
    Value,
    is_committed,
    local_path,
    newest_committed,
    remove_folder,
)

__all__ = ["ShardproofCheckpoint", "ShardproofCheckpointIO", "with_shardproof"]

_LIGHTNING = (
    "pytorch_lightning"
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    else "lightning.pytorch"
)
"""The package that the program uses."""

_plugins: Any = import_module(f"{_LIGHTNING}.plugins")
CheckpointIO: Any = _plugins.CheckpointIO
_TorchCheckpointIO: Any = _plugins.TorchCheckpointIO
ModelCheckpoint: Any = import_module(f"{_LIGHTNING}.callbacks").ModelCheckpoint
_log = logging.getLogger("shardproof")
_REFUSED = {
    "FSDPStrategy": "FSDP1 collects its state with collectives. Use ModelParallelStrategy with fully_shard",
    "DeepSpeedStrategy": "DeepSpeed saves its engine itself. Use ModelCheckpoint",
    "XLAStrategy": "XLA devices are not supported. Use ModelCheckpoint",
    "XLAFSDPStrategy": "XLA devices are not supported. Use ModelCheckpoint",
}
"""Strategies whose ranks cannot save their own parts: the reason, and what to do."""
_KIND: Any = ABC
"""In place of the class of the strategy, whose methods follow those of `_StrategyMethods`. It is the base of
Lightning's `Strategy`: with another one, Python refuses the assignment to `strategy.__class__`."""


class ShardproofCheckpointIO(CheckpointIO):
    """Writes the state that Lightning collects as a folder of shardproof. Loads verify it.

    Lightning calls it on rank 0 alone, with the state of rank 0, and waits for it. Prefer
    `ShardproofCheckpoint`: each rank saves its part in the background, with its random states and the
    positions of its data loaders.

    `ModelParallelStrategy` and `FSDPStrategy` write sharded checkpoints without a call of a `CheckpointIO`.
    Use `ShardproofCheckpoint` with `ModelParallelStrategy`. It does not support `FSDPStrategy`.

    Example:
        >>> from shardproof.frameworks.lightning import ShardproofCheckpointIO  # doctest: +SKIP
        >>> trainer = Trainer(plugins=[ShardproofCheckpointIO()])  # doctest: +SKIP
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint, and returns when it is committed. A committed one at the path is replaced.

        Args:
            checkpoint: Lightning's checkpoint: tensors and plain data.
            path: the folder.
            storage_options: not supported.

        Raises:
            TypeError: `storage_options` is given.
            ValueError: `path` is a URL.
            ShardproofError: see `shardproof.save`. Lightning's other ranks then wait until the timeout of the
                process group.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r}: shardproof saves to a path. Leave it out")
        rest = dict(checkpoint)
        weights = rest.pop("state_dict")
        sp.save(
            local_path(path),
            {"state_dict": _Weights(weights), "lightning": Value(rest)},
            step=rest.get("global_step"),
            overwrite=True,
            rendezvous=sp.rendezvous.LocalRendezvous(),
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint of shardproof, or a file that Lightning wrote. Each rank reads all of it.

        Args:
            path: the folder or file.
            map_location: the device of the tensors, for example ``"cpu"``, which is the default. A function
                or a mapping is only for files of Lightning.
            weights_only: option of `torch.load`, for a file of Lightning. A checkpoint of shardproof has no
                pickle.

        Returns:
            Lightning's checkpoint.

        Raises:
            TypeError: `map_location` is not a device.
            ShardproofError: see `shardproof.load`.
        """
        if not os.path.isdir(path):
            options = {} if weights_only is None else {"weights_only": weights_only}
            plain: dict[str, Any] = _TorchCheckpointIO().load_checkpoint(path, map_location, **options)
            return plain
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise TypeError(f"map_location={map_location!r}: pass a device, or None for the CPU")
        weights, rest = _Weights(), Value()
        sp.load(
            local_path(path),
            {"state_dict": weights, "lightning": rest},
            rendezvous=sp.rendezvous.LocalRendezvous(),
        )
        checkpoint = {**rest.value, "state_dict": weights.value}
        if map_location is None:
            return checkpoint
        moved: dict[str, Any] = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(map_location), checkpoint
        )
        return moved

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a folder or file, if it exists."""
        remove_folder(local_path(path))


class _Weights(Value):
    """The weights, each under a key of its own, including small ones."""

    def state_dict(self) -> Any:
        """The weights."""
        return self.value

    def load_state_dict(self, value: Any) -> None:
        """Replaces the weights."""
        self.value = value


class _StrategyMethods(_KIND):
    """The methods that `with_shardproof` puts before those of a strategy. Lightning calls all ranks."""

    shardproof_saves: FolderSaves
    """Saves and loads the folders."""
    shardproof_loaded = False
    """True after `load_checkpoint` has loaded a checkpoint of shardproof."""
    _given: dict[str, Any] | None = None
    """The module's values that the strategy returned for Lightning's next checkpoint."""
    _random: dict[str, Any] | None = None
    """The random state of the loaded checkpoint, until training starts."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because a load fills the optimizers in place, and `setup` makes them."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False after a load of a checkpoint of shardproof, which has filled the optimizers."""
        return not self.shardproof_loaded and super().lightning_restore_optimizer

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the module, without a copy or a collective."""
        state: dict[str, Any] = self._module.state_dict()
        self._given = dict(state)  # a copy: hooks may change the dict that Lightning gets
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: `save_checkpoint` saves the optimizer itself."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begins to save a folder.

        Args:
            checkpoint: Lightning's checkpoint. Hooks may have changed its `state_dict`.
            filepath: the folder.
            storage_options: not supported.

        Raises:
            TypeError: `storage_options` is given.
            ShardproofError: see `shardproof.save`; or the failure of the previous save.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r}: shardproof saves to a path. Leave it out")
        rest = dict(checkpoint)
        weights = rest.pop("state_dict")
        state: dict[str, Any] = {"state_dict": self._module}
        given, self._given = self._given, None
        if given is None or (
            weights.keys() != given.keys() or any(weights[key] is not value for key, value in given.items())
        ):  # a hook replaced, added or removed some
            state["state_dict"] = weights
        if rest.pop("optimizer_states", None) is not None:
            state["optimizers"] = self._optimizer_states()
            state["rng"] = sp.RandomState()
            state["loaders"] = sp.PerRank(Value(_take_loaders(rest)))
        if self.is_global_zero:
            state["lightning"] = Value(rest)
        self.shardproof_saves.save(filepath, state, step=rest.get("global_step"))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Loads a folder of shardproof into module and optimizers, or a checkpoint of Lightning.

        All ranks use the path of rank 0. Further arguments are for a checkpoint of Lightning.

        Returns:
            Lightning's checkpoint. The state dict is that of the loaded module.
        """
        checkpoint_path = self.shardproof_saves.choose(
            os.path.dirname(checkpoint_path), lambda: os.fspath(checkpoint_path)
        )
        shards = os.path.join(checkpoint_path, "shards")  # not in a folder of Lightning
        self.shardproof_loaded = self.shardproof_saves.agree(
            checkpoint_path, lambda: is_committed(checkpoint_path) or os.path.isdir(shards)
        )
        if not self.shardproof_loaded:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
            return loaded
        rest, loaders = Value(), Value([])
        training = {
            "optimizers": self._optimizer_states(),
            "rng": sp.RandomState(),
            "loaders": sp.PerRank(loaders),
        }
        fits = self._module.trainer.state.fn == "fit"
        weights = {"state_dict": self._module}
        others: dict[str, Any] = {"lightning": rest, **(training if fits else {})}
        left = [] if fits else list(training)
        load = self.shardproof_saves.load
        if self._module.strict_loading:
            load(checkpoint_path, weights | others, exclude=left)
        else:  # before any change, all values except the weights must be there
            load(checkpoint_path, others, exclude=[*left, "state_dict"])
            load(checkpoint_path, weights, include="state_dict", strict=False)
        if fits:
            self._random = sp.RandomState().state_dict()
        if loaders.value:
            rest.value["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders.value
        return {**rest.value, "state_dict": self._module.state_dict(), "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Any, *args: Any, **options: Any) -> None:
        """Does nothing for a checkpoint of shardproof: `load_checkpoint` has filled the module."""
        if not self.shardproof_loaded:
            super().load_model_state_dict(checkpoint, *args, **options)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Gives the samplers of a data loader the epoch in which the run resumes."""
        _set_sampler_epoch(dataloader, self._module.trainer.fit_loop.epoch_progress.current.processed)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Makes a resumed run continue with the batch after the save.

        Lightning calls this after the hooks of callbacks and of the module, before the first batch.
        """
        super().on_train_start()
        random, self._random = self._random, None
        fit_loop = self._module.trainer.fit_loop
        if fit_loop.is_resuming:
            _continue_batches(fit_loop, random)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint after the commit of the newest save."""
        if self.is_global_zero:
            self.shardproof_saves.remove(filepath)

    def teardown(self) -> None:
        """Waits for the current save, before the strategy moves the module to the CPU."""
        try:
            self.shardproof_saves.wait()
        finally:
            super().teardown()

    @property
    def _module(self) -> Any:
        return self.lightning_module

    def _optimizer_states(self) -> list[sp.OptimizerState]:
        return [sp.OptimizerState(item, self._module) for item in self.optimizers]


def with_shardproof(kind: Any) -> Any:
    """A strategy of Lightning that saves and loads with shardproof.

    `ShardproofCheckpoint` sets this class on its trainer's strategy, so programs do not call this function.

    Every rank saves its part of the module and of the optimizers, and its random state. Rank 0 saves the rest
    of Lightning's checkpoint. A load fills the module and the optimizers in place, before the hooks
    `on_load_checkpoint`. Lightning's own strategy loads checkpoints that Lightning wrote.

    Args:
        kind: the class of the strategy.

    Returns:
        A class derived from it, with the same name; `kind` itself if it is such a class.
    """
    if issubclass(kind, _StrategyMethods):
        return kind
    return type(kind)(kind.__name__, (_StrategyMethods, kind), {})


class ShardproofCheckpoint(ModelCheckpoint):
    """Saves checkpoints during training, as Lightning's `ModelCheckpoint`, with shardproof.

    ``trainer.fit(ckpt_path="last")`` resumes from the newest committed checkpoint in `dirpath`. Without one,
    training starts from the beginning. `trainer.save_checkpoint` also saves with shardproof.

    Args:
        args: arguments of `ModelCheckpoint`.
        background: False to wait for the commit of each save. Use it if a callback writes to parameters
            outside of an optimizer step, for example weight averaging.
        options: options of `ModelCheckpoint`.

    Example:
        >>> from shardproof.frameworks.lightning import ShardproofCheckpoint  # doctest: +SKIP
        >>> trainer = Trainer(callbacks=[ShardproofCheckpoint(every_n_epochs=1)])  # doctest: +SKIP
    """

    def __init__(self, *args: Any, background: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self._saves = FolderSaves(background=background)

    @property
    def state_key(self) -> str:
        """The key of `ModelCheckpoint`, so that its state in older checkpoints is restored."""
        key: str = super().state_key
        return key.replace(type(self).__qualname__, "ModelCheckpoint", 1)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Makes the strategy save and load with shardproof.

        Raises:
            TypeError: the strategy is not supported.
        """
        strategy = trainer.strategy
        kind = type(strategy)
        for name in [base.__name__ for base in kind.__mro__ if base.__name__ in _REFUSED]:
            raise TypeError(f"ShardproofCheckpoint does not work with {name}: {_REFUSED[name]}")
        if not hasattr(strategy, "shardproof_saves"):
            strategy.__class__ = with_shardproof(kind)
        strategy.shardproof_saves = self._saves
        super().setup(trainer, pl_module, stage)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """The candidates for ``ckpt_path="last"``: the newest committed checkpoint, or Lightning's own."""
        folder = self.dirpath or self._ModelCheckpoint__resolve_ckpt_dir(trainer)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        newest = newest_committed(os.path.join(folder, name) for name in names)
        if newest is not None:
            return {newest}
        return {path for path in super()._find_last_checkpoints(trainer) if os.path.isfile(path)}


def _take_loaders(checkpoint: dict[str, Any]) -> Any:
    """Removes the states of the data loaders from Lightning's checkpoint. They differ between ranks."""
    loops = dict(checkpoint.get("loops", {}))
    fit = dict(loops.get("fit_loop", {}))
    state = dict(fit.get("state_dict", {}))
    loaders = state.pop("combined_loader", [])
    if loops:
        checkpoint["loops"] = loops | {"fit_loop": fit | {"state_dict": state}}
    return loaders


def _set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Gives the samplers of a loader the epoch, before an iterator of the loader is made."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _continue_batches(fit_loop: Any, random: dict[str, Any] | None) -> None:
    """Makes the first epoch of a resumed run continue with the batch after the save.

    Called when Lightning has restored the loaders and made their iterators, before the first batch.
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
