"""Trains, and resumes if started again: torchrun --nproc-per-node 2 examples/hf_trainer.py RUN."""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from shardproof.frameworks.transformers import last_checkpoint, with_shardproof

set_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
)
texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (96, 12))]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=int(os.environ.get("STEPS", "12")),
    per_device_train_batch_size=4,
    save_steps=2,
    save_total_limit=3,
    learning_rate=1e-3,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = with_shardproof(Trainer)(model, arguments, train_dataset=texts)
trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output_dir))
