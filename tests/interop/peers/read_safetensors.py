"""Reads safetensors files with the libraries that users open them with.

`read_safetensors.py safe_open PATH` opens a file, or each file of a folder, with `safetensors.safe_open`.
Where the folder has an index, it must name each tensor's file.

`read_safetensors.py transformers PATH` loads a model folder with `from_pretrained` and saves the model
again: the result is what the second file has, under the names that Hugging Face stores.

`read_safetensors.py peft PATH BASE` loads an adapter folder onto the model of BASE: the result is the
adapter's state. The base is cast to the adapter's dtype, because peft casts `modules_to_save` to that of
the base.

`read_safetensors.py accelerate PATH` loads a model folder with `load_checkpoint_in_model` into an empty
model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer_result import Result
from safetensors import safe_open


def read_files(path: Path) -> Result:
    result = Result()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    placed: dict[str, str] = {}
    for name in files:
        with safe_open(name, framework="pt") as file:
            result.facts.setdefault("metadata", {})[name.name] = file.metadata()
            for key in file.keys():  # noqa: SIM118
                if key in placed:
                    raise ValueError(f"{key} is in {placed[key]} and in {name.name}")
                placed[key] = name.name
                result.add_tensor(key, file.get_tensor(key))
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        if weight_map != placed:
            raise ValueError(f"the index says {weight_map}, the files have {placed}")
    result.facts["files"] = [name.name for name in files]
    return result


def read_pretrained(path: Path) -> Result:
    from transformers import AutoModelForCausalLM, __version__

    model, loading = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    result = _saved_again(model)
    result.facts |= {name: sorted(map(str, keys)) for name, keys in loading.items()}
    result.facts["transformers"] = __version__
    result.facts["state_dict_keys"] = sorted(model.state_dict())
    return result


def read_adapter(path: Path, base: Path) -> Result:
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    with safe_open(path / "adapter_model.safetensors", framework="pt") as file:
        dtype = next(file.get_tensor(key).dtype for key in file.keys())  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model = PeftModel.from_pretrained(model, path, autocast_adapter_dtype=False)
    result = Result()
    for key, tensor in get_peft_model_state_dict(model).items():
        result.add_tensor(key, tensor)
    return result


def read_with_accelerate(path: Path) -> Result:
    from accelerate import init_empty_weights, load_checkpoint_in_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    load_checkpoint_in_model(model, path, device_map={"": "cpu"}, dtype=config.dtype, strict=False)
    model.tie_weights()
    result = Result()
    for key, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"{key} was not loaded")
        result.add_tensor(key, tensor)
    return result


def _saved_again(model: Any) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return read_files(Path(folder))


READERS = {
    "safe_open": read_files,
    "transformers": read_pretrained,
    "peft": read_adapter,
    "accelerate": read_with_accelerate,
}
mode, *paths = sys.argv[1:]
READERS[mode](*map(Path, paths)).write()
