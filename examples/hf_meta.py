"""Fine-tunes a model of Hugging Face: `torchrun --nproc-per-node 2 hf_meta.py MODEL RUN STEPS`.

Started again, also on another number of ranks, it resumes from the newest step of RUN. At the end it writes
RUN-model, a folder that `from_pretrained` opens.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import shardproof as sp
from shardproof.frameworks.huggingface import load_pretrained, save_pretrained

source, run, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group()
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
load_pretrained(model, source)  # each rank reads its own part

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}
checkpointer = sp.Checkpointer(run, keep=sp.KeepLatest(2))
resumed = checkpointer.restore(state) or 0
for step in range(resumed + 1, steps + 1):
    torch.manual_seed(step)
    tokens = torch.randint(model.config.vocab_size, (4, 16))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step, state).result()
    print(f"step {step}, resumed from {resumed}, loss {loss.item():.4f}", flush=True)
save_pretrained(model, f"{run}-model")
