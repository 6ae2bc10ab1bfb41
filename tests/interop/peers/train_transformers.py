"""Trains with the Trainer of transformers: `train_transformers.py WHO RUN STEPS [LAST]`.

WHO is `ours` or `theirs`, with suffixes: `-peft` for LoRA, `-peft-prompt` and `-peft-prefix` for a trained
prompt, `-two` to keep two checkpoints, `-best` to load the best model in the end, `-fails` to fail the last
save. `ours-wrong` resumes from a checkpoint that is not committed.
With LAST, the restored state is saved there before the first step, and nothing is trained.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import shardproof as sp
from shardproof.frameworks import transformers as adapter
from shardproof.frameworks.transformers import last_checkpoint, with_shardproof
from shardproof.storage import LocalSink

WHO, RUN, STEPS, *LAST = sys.argv[1:]


class SaveRestored(TrainerCallback):
    def on_step_begin(self, *_: Any, **trained: Any) -> None:
        optimizer = trained["optimizer"].optimizer
        state = {
            "model": trained["model"],
            "optimizer": sp.OptimizerState(optimizer, trained["model"]),
            "scheduler": trained["lr_scheduler"],
            "rng": sp.RandomState(),
        }
        sp.save(LAST[0], state)
        sys.stdout.flush()
        os._exit(0)


class FailLastSave(TrainerCallback):
    def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        if state.global_step == int(STEPS) and os.environ["RANK"] == "1":
            LocalSink.write_at = full  # type: ignore[method-assign]


def main() -> None:
    set_seed(1 + 10 * len(LAST))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.2, **sizes))
    if "peft" in WHO:
        from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

        config: Any = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
        if "prompt" in WHO:
            config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        if "prefix" in WHO:
            config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True)
        model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (54, 8), generator=generator)]
    options: dict[str, Any] = {}
    if "best" in WHO:
        options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        options |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    arguments = TrainingArguments(
        RUN,
        max_steps=int(STEPS),
        per_device_train_batch_size=3,
        save_steps=2,
        save_total_limit=None if WHO == "theirs" else 2 if "two" in WHO else 1,
        learning_rate=3e-3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = (Trainer if WHO == "theirs" else with_shardproof(Trainer))(
        model,
        arguments,
        train_dataset=texts,
        eval_dataset=texts[:6],
        callbacks=[SaveRestored()] if LAST else [],
    )
    if WHO == "ours-wrong":
        os.makedirs(f"{RUN}/checkpoint-3/shardproof/shards")
        for wrong in (True, f"{RUN}/checkpoint-3"):
            try:
                trainer.train(resume_from_checkpoint=wrong)
            except (ValueError, sp.NotCommittedError) as error:
                print(type(error).__name__, error)
        return
    if "fails" in WHO:
        trainer.add_callback(FailLastSave())
        try:
            trainer.train()
        except sp.ShardproofError as error:
            print(type(error).__name__, error)
        return
    last = last_checkpoint(RUN)
    if os.environ["RANK"] != "0":
        for name in ("_is_ours", "_has"):
            mock.patch.object(adapter, name, None).start()  # rank 0 alone finds the format
    trainer.train(resume_from_checkpoint=last)
    if "best" in WHO:
        print("best", os.path.basename(trainer.state.best_model_checkpoint))
        sp.save(f"{RUN}-end", {"model": model})


if __name__ == "__main__":
    main()
