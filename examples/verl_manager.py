"""verl's checkpoint manager of FSDP, with checkpoints that load on any number of ranks."""

import os
import shutil
from typing import Any

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

import shardproof as sp
from shardproof.frameworks.huggingface import save_pretrained


class ShardproofCheckpointManager(FSDPCheckpointManager):
    def state(self, contents: list[str]) -> dict[str, Any]:
        parts = {
            "model": lambda: {"model": self.model},
            "optimizer": lambda: {"optimizer": sp.OptimizerState(self.optimizer, self.model)},
            "extra": lambda: {"lr_scheduler": self.lr_scheduler, "rng": sp.RandomState()},
            "hf_model": dict,
        }
        return {name: value for part in contents for name, value in parts[part]().items()}

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        sp.save(local_path, self.state(self.checkpoint_save_contents), step=global_step, overwrite=True)
        weights = f"{local_path}/huggingface"
        if self.rank == 0:
            shutil.rmtree(weights, ignore_errors=True)  # of the checkpoint that this one replaced
        if self.should_save_hf_model:
            save_pretrained(self.model, weights)
        if self.rank == 0:  # after the commit
            if self.should_save_hf_model and self.processing_class is not None:
                self.processing_class.save_pretrained(weights)
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        if local_path is None:
            return
        state, rename = self.state(self.checkpoint_load_contents), {}
        if not os.path.exists(f"{local_path}/manifest.json"):  # verl's, with its own random states
            state.pop("rng", None)
            rename = {"lr_scheduler": "extra_state.lr_scheduler"} if "lr_scheduler" in state else {}
        sp.load(local_path, state, include=list(state), rename=rename)
