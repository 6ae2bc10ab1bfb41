"""Hugging Face transformers: sharded models from the files of `from_pretrained`, and back.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fully_shard(model)
    load_pretrained(model, "Mixtral-8x7B")         # each rank reads its own boxes
    ...
    save_pretrained(model, "trained")              # a folder that from_pretrained opens

transformers defines how the tensors of a module correspond to those of the files: by name, or joined, like
the experts of Mixtral. Its conversions run on traced tensors. The resulting boxes are views of this rank's
parameters, under the keys of the files. `shardproof.load` and `shardproof.save` read and write these views.
"""

from __future__ import annotations

try:
    import transformers.core_model_loading  # noqa: F401  transformers 5 has it
except ImportError as error:
    raise ImportError(
        "shardproof.frameworks.huggingface needs transformers 5: pip install 'transformers>=5'"
    ) from error

from shardproof.frameworks.huggingface.pretrained import load_pretrained, save_pretrained

__all__ = ["load_pretrained", "save_pretrained"]
