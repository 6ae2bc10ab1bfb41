"""Trains with TRL's SFTTrainer, and resumes if started again: `train_trl.py RUN`."""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from shardproof.frameworks.transformers import last_checkpoint, with_shardproof

RUN = sys.argv[1]


def main() -> None:
    set_seed(1)
    words = {f"w{number}": number for number in range(62)} | {"[PAD]": 62, "[EOS]": 63}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="[PAD]", eos_token="[EOS]"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.2, **sizes))
    texts = Dataset.from_dict({"input_ids": torch.randint(0, 62, (24, 8)).tolist()})
    arguments = SFTConfig(
        output_dir=RUN,
        max_steps=6,
        per_device_train_batch_size=2,
        save_steps=2,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = with_shardproof(SFTTrainer)(
        model=model, args=arguments, train_dataset=texts, processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(RUN))


if __name__ == "__main__":
    main()
