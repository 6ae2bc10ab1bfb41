"""Trains a GPT of Megatron-Core, and resumes: torchrun --nproc-per-node 4 megatron.py RUN STEPS TP"""

import sys
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from shardproof.frameworks import megatron_core as dist_checkpointing

run, last_step, tp, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 0
torch.distributed.init_process_group()
parallel_state.initialize_model_parallel(tp)
tensor_parallel.model_parallel_cuda_manual_seed(0)
sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "tensor_model_parallel_size": tp}
config = TransformerConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8).cuda()
model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, use_distributed_optimizer=True), [model])
strategy, saving = dist_checkpointing.SaveStrategy(), None
if newest := max(run.glob("iter_*/manifest.json"), default=None):
    state = dist_checkpointing.live_state(gpt, optimizer, checkpoint_dir=newest.parent)
    step = dist_checkpointing.load_live_state(gpt, optimizer, state, newest.parent)["step"]
while (step := step + 1) <= last_step:
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(step)).cuda()
    model.zero_grad_buffer()
    loss = model(tokens[:, :-1], torch.arange(8)[None].cuda(), None, labels=tokens[:, 1:]).mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    print(f"step {step}: loss {loss.item()}", flush=True)
    if step % 2 == 0:
        state = dist_checkpointing.live_state(gpt, optimizer) | {"step": step}
        saving = dist_checkpointing.begin_save(state, run / f"iter_{step:07d}", strategy)
saving and saving.result()  # durable and verified
