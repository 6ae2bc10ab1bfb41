"""Writes the weights of a GPT with experts of Megatron-Core: `write_megatron_moe.py PATH`.

The ranks share the experts. The result has no tensors: `read_torch_dist.py plain` reads what was written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank, world_size

cpu_stubs.install()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def main() -> None:
    path = Path(sys.argv[1])
    join_ranks()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size())
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7 + rank())
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        num_moe_experts=4,
        expert_model_parallel_size=world_size(),
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(4),
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="rope",
    )
    metadata = {
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = model.sharded_state_dict(metadata=metadata)
    if rank() == 0:
        path.mkdir()
    dist.barrier()
    dist_checkpointing.save(state | {"iteration": 5}, str(path))
    leave_ranks(Result())


if __name__ == "__main__":
    main()
