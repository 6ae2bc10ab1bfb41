"""Checkpoints of the `Trainer` of transformers. Each rank saves its own part in the background.

`with_shardproof` derives a class from `Trainer`, or from a subclass of it such as TRL's:

    from shardproof.frameworks.transformers import last_checkpoint, with_shardproof

    trainer = with_shardproof(Trainer)(model, arguments, ...)
    trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output_dir))

A checkpoint is the Trainer's folder `checkpoint-<step>` with `trainer_state.json` and the configuration of
the model. Weights, optimizer, scheduler, scaler and random states are in its folder `shardproof`.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import shardproof as sp
from shardproof.engine.state import local_tensor
from shardproof.frameworks.shared.folder_saves import (
    FolderSaves,
    folders_to_remove,
    is_committed,
    numbered_folders,
    remove_folder,
)

__all__ = ["last_checkpoint", "with_shardproof"]

FOLDER = "shardproof"
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_STATE = "trainer_state.json"

_KIND: Any = object
"""In place of the class of the trainer, whose methods follow those of `_TrainerMethods`."""


class _TrainerMethods(_KIND):
    """The methods that `with_shardproof` puts before those of a trainer.

    It overrides `_save_checkpoint` and the `_load...` methods.
    """

    shardproof_background: bool
    """False to wait for the commit of each save."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.is_deepspeed_enabled:
            raise TypeError(
                "with_shardproof does not work with DeepSpeed, whose engine saves its state itself. Use the "
                "trainer without it, and `shardproof convert` for what it writes"
            )
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise ValueError(
                f"hub_strategy={str(self.args.hub_strategy.value)!r} pushes each checkpoint before it is "
                'committed. Use hub_strategy="end"'
            )
        self.shardproof_saves = FolderSaves(background=self.shardproof_background)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Trains, and returns after the commit of the last save.

        Args:
            resume_from_checkpoint: a folder, or True for the newest committed one. All ranks use the
                folder of rank 0.
            args: arguments of `Trainer.train`.
            options: options of `Trainer.train`.

        Raises:
            ValueError: `resume_from_checkpoint` is True, and no checkpoint is committed.
            NotCommittedError: the save of this checkpoint did not finish.
        """
        run, wanted = self.args.output_dir, resume_from_checkpoint
        found = self.shardproof_saves.choose(
            run, lambda: last_checkpoint(run) if wanted is True else wanted or None
        )
        if wanted is True and found is None:
            raise ValueError(
                f"{run} has no committed checkpoint. Leave resume_from_checkpoint out, or set it to "
                "last_checkpoint(output_dir), which may be None"
            )
        try:
            return super().train(found, *args, **options)
        finally:
            self.shardproof_saves.wait()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes weights for `from_pretrained`; within a checkpoint only their configuration.

        Args:
            output_dir: the folder; None for `output_dir` of the arguments.
        """
        if not _internal_call:
            self.shardproof_saves.wait_for_end()
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            os.makedirs(output_dir or self.args.output_dir, exist_ok=True)
            configurations = (
                self.model.peft_config.values()
                if hasattr(self.model, "peft_config")
                else [getattr(self.model, name, None) for name in ("config", "generation_config")]
            )
            for item in [*configurations, self.processing_class]:
                if item is not None:
                    item.save_pretrained(output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.shardproof_saves.wait_for_end()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:  # older checkpoints are removed after the commit; the Trainer would remove them before it
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        run, step = self._get_output_dir(trial), self.state.global_step
        state = {"model": _weights(self.model)}
        if not self.args.save_only_model:
            state |= self._optimizer_tree() | self._scaler_tree() | {"rng": sp.RandomState()}
        rotate = partial(_rotate, run, limit, step, self.state.best_model_checkpoint)
        self.shardproof_saves.save(
            os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{step}", FOLDER),
            state,
            step=step,
            then=rotate if limit and self.is_world_process_zero() else None,
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Nothing: `_save_checkpoint` saves them."""

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: `_save_checkpoint` saves it."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: `_save_checkpoint` saves it."""

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self.shardproof_saves.wait()  # before the Trainer removes folders and loads the best model
        return super()._finalize_training(*args, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._reads_ours(resume_from_checkpoint):
            self._load_tree(resume_from_checkpoint, {"model": _weights(self.model)})
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._reads_ours(best):
            self._load_tree(best, {"model": _weights(self.model)})
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._reads_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        elif self._stores(checkpoint, "rng"):
            self._load_tree(checkpoint, self._optimizer_tree())

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._reads_ours(checkpoint):
            super()._load_scaler(checkpoint)
        elif self._stores(checkpoint, "scaler"):
            self._load_tree(checkpoint, self._scaler_tree())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._reads_ours(checkpoint):
            super()._load_rng_state(checkpoint)
        elif self._stores(checkpoint, "rng"):
            self._load_tree(checkpoint, {"rng": sp.RandomState()})

    def _reads_ours(self, checkpoint: str) -> bool:
        return self.shardproof_saves.agree(checkpoint, lambda: _is_ours(checkpoint))

    def _stores(self, checkpoint: str, key: str) -> bool:
        def has_key() -> bool:
            with sp.open(os.path.join(checkpoint, FOLDER)) as stored:
                return any(f"{name}.".startswith(f"{key}.") for name in stored)

        return self.shardproof_saves.agree(checkpoint, has_key)

    def _load_tree(self, checkpoint: str, state: dict[str, Any]) -> None:
        if state:
            self.shardproof_saves.load(os.path.join(checkpoint, FOLDER), state, include=list(state))

    def _optimizer_tree(self) -> dict[str, Any]:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # inside of Accelerate's
        return {"optimizer": sp.OptimizerState(optimizer, self.model), "scheduler": self.lr_scheduler}

    def _scaler_tree(self) -> dict[str, Any]:
        scaler = getattr(self.accelerator, "scaler", None)
        return {} if scaler is None else {"scaler": scaler}


def with_shardproof(kind: Any, *, background: bool = True) -> Any:
    """A class of trainers that saves and loads with shardproof.

    It also resumes from checkpoints that the Trainer wrote. `Trainer.save_model` still writes weights for
    `from_pretrained`. Of a PEFT model, only the adapters are saved.

    Args:
        kind: `transformers.Trainer` or a subclass of it.
        background: False to wait for the commit of each save. Use it if a callback writes to parameters
            outside of an optimizer step.

    Returns:
        A class derived from `kind`, with the same name.

    Example:
        >>> trainer = with_shardproof(Trainer)(model, arguments)  # doctest: +SKIP
    """
    bases = (kind,) if issubclass(kind, _TrainerMethods) else (_TrainerMethods, kind)
    return type(kind)(kind.__name__, bases, {"shardproof_background": background})


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint from which training can resume; None if there is none.

    It replaces `transformers.trainer_utils.get_last_checkpoint`, which also returns the folder of a save that
    did not finish.

    Args:
        folder: the output folder of the trainer. It need not exist.
    """
    usable = [path for _, path in numbered_folders(folder, _NAME) if _is_usable(path)]
    return usable[-1] if usable else None


def _is_ours(checkpoint: str) -> bool:
    return os.path.isdir(os.path.join(checkpoint, FOLDER))


def _is_usable(checkpoint: str) -> bool:
    if _is_ours(checkpoint):
        return is_committed(os.path.join(checkpoint, FOLDER))
    if not os.path.isfile(os.path.join(checkpoint, _STATE)):
        return False
    names = os.listdir(checkpoint)  # a save of ours that was killed before its first file has none of these
    return any(name.endswith((".safetensors", ".bin", ".pth", ".pt")) for name in names)


def _weights(model: Any) -> Any:
    """The saved part of the model: the model itself, or the adapters of a PEFT model by name.

    PEFT exports a prompt as the output of its encoder, which is a copy. So the encoder is saved instead.
    """
    if not hasattr(model, "peft_config"):
        return model
    from peft import get_peft_model_state_dict

    weights: dict[str, dict[str, Any]] = {}
    for name, config in model.peft_config.items():
        values = dict(get_peft_model_state_dict(model, adapter_name=name))
        if config.is_prompt_learning:
            values.pop("prompt_embeddings", None)
            encoder = model.prompt_encoder[name].state_dict()
            values |= {f"prompt_encoder.{key}": value for key, value in encoder.items()}
        weights[name] = values
    memory = {_address(value) for value in [*model.parameters(), *model.buffers()]}
    for name, values in weights.items():
        for key, value in values.items():
            if _address(value) not in memory:
                raise TypeError(
                    f"adapter {name!r}: PEFT exports {key!r} as a copy of its parameters "
                    f"({model.peft_config[name].peft_type}), so a load cannot fill the model. Train with "
                    "Trainer itself, or with an adapter of another type"
                )
    return weights


def _address(value: Any) -> int:
    """The address of the memory that a tensor is part of; of a DTensor, that of this rank's part."""
    return local_tensor(value).untyped_storage().data_ptr()


def _rotate(run: str, limit: int, step: int, best: str | None) -> None:
    """Removes the oldest checkpoints up to the committed `step`, so that `limit` of them remain.

    The best and the newest one always remain. Checkpoints that are not committed do not count, and are also
    removed.
    """
    found = [path for number, path in numbered_folders(run, _NAME) if number <= step]
    known = [path for path in found if _is_usable(path)]
    remaining = set(known[-1:])
    if best is not None:
        remaining.add(os.path.join(run, os.path.basename(best)))
    for path in folders_to_remove(found, known, max(limit, len(remaining)), remaining):
        remove_folder(os.path.join(path, FOLDER))
        remove_folder(path)
