"""Takes a step before the last save is written: `step_while_saving.py FRAMEWORK FENCE RUN`.

FRAMEWORK is `lightning`, `accelerate`, `transformers`, `deepspeed-1` or `deepspeed-3` (the ZeRO stage), whose
wrapper of the optimizer takes the step. The writer waits until that step is over. FENCE is `fence`, or `open`
to leave the fence out. Prints whether the checkpoint has the values before the step, or the save's error.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardproof as sp
from shardproof.state import Fence
from shardproof.storage import LocalSink

FRAMEWORK, FENCE, RUN = sys.argv[1:]
MODELS: list[nn.Module] = []
AFTER_FIRST_STEP: dict[str, torch.Tensor] = {}
WRITING = threading.Event()
write_at = LocalSink.write_at


def write_later(sink: Any, *args: Any) -> None:
    assert WRITING.wait(60)
    write_at(sink, *args)


def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if AFTER_FIRST_STEP:
        WRITING.set()
        return
    for name, parameter in MODELS[0].named_parameters() if MODELS else ():
        AFTER_FIRST_STEP[f"weight of {name}"] = parameter.detach().clone()
        AFTER_FIRST_STEP[f"exp_avg of {name}"] = optimizer.state[parameter]["exp_avg"].clone()


def with_lightning() -> tuple[str, str, str]:
    import lightning.pytorch as pl

    from shardproof.frameworks.lightning import ShardproofCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(40, 30)
            MODELS.append(self)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_steps=2,
        accelerator="cpu",
        callbacks=[
            ShardproofCheckpoint(dirpath=RUN, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        ],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 40)))
    return f"{RUN}/step=1.ckpt", "state_dict", "optimizers.0"


def with_accelerate() -> tuple[str, str, str]:
    from accelerate import Accelerator

    from shardproof.frameworks.accelerate import save_state, wait

    accelerator = Accelerator(cpu=True)
    MODELS.append(nn.Linear(40, 30))
    model, optimizer = accelerator.prepare(MODELS[0], torch.optim.AdamW(MODELS[0].parameters(), lr=0.1))
    for step in (1, 2):
        accelerator.backward(model(torch.ones(2, 40)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        save_state(accelerator, f"{RUN}/{step}", background=True)
    wait(accelerator)
    return f"{RUN}/1", "models.0", "optimizers.0"


def with_transformers() -> tuple[str, str, str]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from shardproof.frameworks.transformers import with_shardproof

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    MODELS.append(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)))
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 12))]
    arguments = TrainingArguments(RUN, max_steps=2, save_steps=1, use_cpu=True, report_to="none")
    with_shardproof(Trainer)(MODELS[0], arguments, train_dataset=texts).train()
    return f"{RUN}/checkpoint-1/shardproof", "model", "optimizer"


def with_deepspeed() -> tuple[str, str, str]:
    """The base optimizer has flat partitions, so DeepSpeed's own functions give the values of a parameter."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from shardproof.frameworks.deepspeed import engine_state

    torch.distributed.init_process_group("gloo")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    model = nn.Linear(40, 30)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": int(FRAMEWORK[-1])},
        },
        dist_init_required=False,
    )
    state = engine_state(engine)
    pending = None
    for step in (1, 2):
        engine.backward(engine(torch.ones(2, 40)).square().mean())
        engine.step()
        if pending is None:
            for name, parameter in engine.module.named_parameters():
                AFTER_FIRST_STEP[f"weight of {name}"] = safe_get_full_fp32_param(parameter).clone()
                moment = safe_get_full_optimizer_state(parameter, "exp_avg")
                AFTER_FIRST_STEP[f"exp_avg of {name}"] = moment.clone()
            pending = sp.Checkpointer(RUN).save(step, state)
    assert pending is not None
    pending.result()
    return f"{RUN}/step-00000001", "model", "optimizer"


def main() -> None:
    LocalSink.write_at = write_later  # type: ignore[method-assign]
    register_optimizer_step_post_hook(after_step)
    if FENCE == "open":
        Fence.before_step = lambda *_: None  # type: ignore[method-assign]
    runs = {
        "lightning": with_lightning,
        "accelerate": with_accelerate,
        "transformers": with_transformers,
        "deepspeed-1": with_deepspeed,
        "deepspeed-3": with_deepspeed,
    }
    try:
        folder, model, optimizer = runs[FRAMEWORK]()
    except sp.ShardproofError as error:
        print(error)
        return
    with sp.open(folder) as checkpoint:
        for what, value in AFTER_FIRST_STEP.items():
            slot, _, name = what.partition(" of ")
            key = f"{model}.{name}" if slot == "weight" else f"{optimizer}.{name}.{slot}"
            if not torch.equal(checkpoint[key].read(), value):
                print("torn:", key)
    print("compared", len(AFTER_FIRST_STEP), "tensors")


if __name__ == "__main__":
    main()
