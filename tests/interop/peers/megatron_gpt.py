"""A small GPT of Megatron-Core on the CPU, with its distributed optimizer, in any parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import megatron_stubs
import offload_stubs
import torch

megatron_stubs.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from shardproof import layouts  # noqa: E402

__all__ = ["Run", "declare", "sharded_state"]

SEQUENCE, VOCABULARY, BATCHES = 8, 32, 4


class GatheredAttention(torch.nn.Module):
    """Attention of a context parallel rank to the keys and values of all ranks.

    Megatron-Core has context parallelism in Transformer Engine only, which needs CUDA.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__()
        self.group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        """Takes and returns sequence, batch, and heads, as Megatron's attention does."""
        key, value = (
            tensor_parallel.gather_from_sequence_parallel_region(item.contiguous(), group=self.group)
            for item in (key, value)
        )
        here, there = self.group.rank(), self.group.size()
        everywhere = torch.cat([_on_context_rank(torch.arange(SEQUENCE), at, there) for at in range(there)])
        mask = _on_context_rank(torch.arange(SEQUENCE), here, there)[:, None] >= everywhere
        heads = [item.permute(1, 2, 0, 3) for item in (query, key, value)]
        context = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)


_make_norm = WrappedTorchNorm.__new__


def _norm(kind: Any, config: TransformerConfig, *args: Any, **options: Any) -> torch.nn.Module:
    """A norm of torch that works with sequence parallelism, as Megatron-Core has it in Apex only, for CUDA.

    Ranks sum the gradients of its weights, which are marked for that.
    """
    marked, config.sequence_parallel = config.sequence_parallel, False
    try:
        norm: torch.nn.Module = _make_norm(kind, config, *args, **options)
    finally:
        config.sequence_parallel = marked
    for parameter in norm.parameters():
        parameter.sequence_parallel = marked  # type: ignore[attr-defined]
    return norm


WrappedTorchNorm.__new__ = _norm


@dataclass
class Run:
    """The model and its optimizer on this rank. Each virtual pipeline stage is a chunk of the model.

    Args:
        layout: names of `parallel_state.initialize_model_parallel`, such as `tensor_model_parallel_size`.
        seed: of the weights.
        options: of `TransformerConfig`, in the place of the default ones. `engine` is for layers of
            Transformer Engine, and `optimizer` has options of `OptimizerConfig`. `adam` is "torch" for
            torch's AdamW. `offload` is a fraction, for a HybridDeviceOptimizer, with or without `overlap`.
            `batches` is the number of batches of a step, which the data parallel ranks share.
    """

    layout: dict[str, int]
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**self.layout)
        torch.manual_seed(self.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(self.seed, force_reset_rng=True)
        engine, of_optimizer = self.options.pop("engine", False), self.options.pop("optimizer", {})
        adam, offload = self.options.pop("adam", "fused"), self.options.pop("offload", None)
        overlap, self.batches = self.options.pop("overlap", False), self.options.pop("batches", BATCHES)
        dtype = getattr(torch, self.options.pop("dtype", "bfloat16"))
        megatron_stubs.choose_adam(fused=adam == "fused")
        if offload is not None:
            offload_stubs.install()
            of_optimizer = {
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": offload,
                "overlap_cpu_optimizer_d2h_h2d": overlap,
                "use_precision_aware_optimizer": True,
                **of_optimizer,
            }
        if self.layout.get("tensor_model_parallel_size", 1) == 1:
            self.options.pop("sequence_parallel", None)  # which Megatron-Core refuses there
        config = TransformerConfig(
            **{
                "num_layers": 4,
                "hidden_size": 16,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "ffn_hidden_size": 24,
                "gated_linear_unit": True,
                "activation_func": torch.nn.functional.silu,
                "add_bias_linear": False,
                "use_cpu_initialization": True,
                "bf16": dtype == torch.bfloat16,
                "params_dtype": dtype,
                "pipeline_dtype": dtype,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "gradient_accumulation_fusion": False,
                "bias_activation_fusion": False,
                "masked_softmax_fusion": False,
                "bias_dropout_fusion": False,
                **self.layout,
                **self.options,
            }
        )
        data_parallel = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        )
        stages = self.layout.get("virtual_pipeline_model_parallel_size")
        self.chunks = [
            DistributedDataParallel(config, data_parallel, _model(config, stage, engine=engine))
            for stage in (range(stages) if stages else [None])
        ]
        self.model = self.chunks[0]
        for chunk in self.chunks:
            chunk.broadcast_params()
        config.finalize_model_grads_func = finalize_model_grads
        self.config = config
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=1e-4,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                clip_grad=0.0,
                **of_optimizer,
            ),
            self.chunks,
        )

    def train(self, steps: int, first: int = 0) -> None:
        """Takes steps. Their batches depend on the step only."""
        ranks = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        for step in range(first, first + steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = [_batch(step, at) for at in range(self.batches) if at % ranks == rank]
            get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=[iter(batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=self.batches // ranks,
                seq_length=SEQUENCE,
                micro_batch_size=2,
                forward_only=False,
            )
            done, _, _ = self.optimizer.step()
            assert done


def declare(module: Any) -> None:
    """Declares what this rank has of the model: its experts, its parts of divided weights, and its layers."""
    decoder = module.decoder.layers
    layouts.layers(decoder, decoder[0].layer_number - 1)
    total = module.config.num_moe_experts
    if total:
        count = total // parallel_state.get_expert_model_parallel_world_size()
        module.first_expert = first = count * parallel_state.get_expert_model_parallel_rank()
        for layer in decoder:
            layouts.experts.sequential(layer.mlp.experts.local_experts, first=first, total=total)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if ranks > 1:
        here = {"rank": parallel_state.get_tensor_model_parallel_rank(), "ranks": ranks}

        def divide(linear: Any, dim: int) -> None:
            layouts.fused(linear, "weight", [ranks * linear.weight.shape[dim]], dim=dim, **here)

        divide(module.embedding.word_embeddings, 0)
        for layer in decoder:
            divide(layer.self_attention.linear_qkv, 0)  # a rank has whole groups of query, key and value
            divide(layer.self_attention.linear_proj, 1)
            size = ranks * layer.mlp.linear_fc1.weight.shape[0] // 2
            layouts.swiglu(layer.mlp.linear_fc1, "weight", size, **here)
            divide(layer.mlp.linear_fc2, 1)


def sharded_state(run: Run, kind: str, *, is_loading: bool = False) -> dict[str, Any]:
    """The sharded state dict of the model and the optimizer.

    Args:
        run: of this rank.
        kind: `distrib_optim_sharding_type` of Megatron-Core.
        is_loading: as Megatron-Core takes it.
    """
    metadata = {
        "distrib_optim_sharding_type": kind,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    names = ["model"] if len(run.chunks) == 1 else [f"model{at}" for at in range(len(run.chunks))]
    models = {
        name: chunk.module.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, run.chunks, strict=True)
    }
    described = models if len(run.chunks) > 1 else models["model"]
    optimizer = run.optimizer.sharded_state_dict(described, is_loading=is_loading, metadata=metadata)
    return {**models, "optimizer": optimizer, "iteration": 5}


def _model(config: TransformerConfig, stage: int | None, *, engine: bool) -> GPTModel:
    """The layers of a virtual pipeline stage of this rank; None for all of its layers."""
    if engine:
        layer = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts, config.moe_grouped_gemm)
    else:
        layer = get_gpt_layer_local_spec(config.num_moe_experts)
    if config.context_parallel_size > 1 and not engine:
        layer.submodules.self_attention.submodules.core_attention = GatheredAttention
    is_virtual = {"ignore_virtual": False, "vp_stage": stage}
    predictions = (
        get_gpt_mtp_block_spec(config, layer, engine, vp_stage=stage) if config.mtp_num_layers else None
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**is_virtual),
        post_process=parallel_state.is_pipeline_last_stage(**is_virtual),
        # With both and two pipeline stages, 0.19.2 fails an assertion in `sharded_state_dict`.
        share_embeddings_and_output_weights=not config.mtp_num_layers,
        position_embedding_type="rope",
        mtp_block_spec=predictions,
        vp_stage=stage,
    )
    return model.to(config.params_dtype).cuda()


def _on_context_rank(sequence: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The elements of a sequence on a context parallel rank: one of the first half and its mirror."""
    parts = sequence.chunk(2 * ranks)
    return torch.cat([parts[rank], parts[-1 - rank]])


def _batch(step: int, at: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + at)
    return torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)


def _forward(batches: Any, model: Any) -> Any:
    tokens = next(batches).cuda()
    ranks, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    inputs, labels, positions = (
        _on_context_rank(item.mT, rank, ranks).mT
        for item in (tokens[:, :-1], tokens[:, 1:], torch.arange(SEQUENCE).cuda().expand(2, -1))
    )
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None].cuda()
    losses = model(inputs, positions, mask, labels=labels)

    def loss(output: torch.Tensor) -> Any:
        value = output.float().mean()
        return value, {"loss": value.detach()}

    return losses, loss
