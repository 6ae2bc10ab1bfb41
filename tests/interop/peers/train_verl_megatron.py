"""verl's manager of Megatron with Megatron-FSDP: `train_verl_megatron.py save|load FOLDER DIFFS SITE`.

DIFFS is a JSON list with the lines of the page's diffs, which are applied to the source of the manager's two
methods. SITE is the folder of packages with Megatron-Core. The manager is made without verl's configuration:
its attributes are set here. The model, its optimizer and what stands for CUDA are those of
`train_megatron_fsdp_gpt.py`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import textwrap
from typing import Any

ACTION, FOLDER, DIFFS, SITE = sys.argv[1:]
sys.path.append(SITE)

import train_megatron_fsdp_gpt as gpt  # noqa: E402, I001  # before other imports of Megatron: it installs the stubs
import torch.distributed.checkpoint as dcp  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from peer_result import Result, join_ranks, leave_ranks  # noqa: E402
from verl.utils.checkpoint import megatron_checkpoint_manager as verl_manager  # noqa: E402

from shardproof.frameworks import megatron_fsdp  # noqa: E402


def edited(method: Any, lines: list[str]) -> Any:
    """A method of verl after the diff."""
    source = textwrap.dedent(inspect.getsource(method))
    old, new = (
        textwrap.indent("\n".join(line[1:] for line in lines if line[0] == sign), "    ") for sign in "-+"
    )
    assert source.count(old) == 1, f"{method.__name__} of verl does not have these lines:\n{old}"
    names: dict[str, Any] = {"dcp": dcp, "megatron_fsdp": megatron_fsdp}
    exec(source.replace(old, new), vars(verl_manager) | names, names)
    return names[method.__name__]


def main() -> None:
    join_ranks()
    parallel_state.initialize_model_parallel()
    megatron_fsdp.enable_optimizer_offload()
    kind = verl_manager.MegatronCheckpointManager
    save, load = (
        edited(method, lines)
        for method, lines in zip(
            (kind._save_megatron_fsdp_checkpoint, kind._load_megatron_fsdp_checkpoint),
            json.loads(DIFFS),
            strict=True,
        )
    )
    model, optimizer = gpt.built({"stage3"}, seed=int(ACTION == "load"))
    manager = kind.__new__(kind)
    manager.model, manager.optimizer, manager.lr_scheduler = [model], optimizer, None
    manager.use_megatron_fsdp, manager.rank = True, int(os.environ["RANK"])
    manager.use_checkpoint_opt_param_scheduler = False
    manager.checkpoint_save_contents = manager.checkpoint_load_contents = ["model", "optimizer", "extra"]
    result = Result()
    path = verl_manager.get_model_dist_checkpoint_path(FOLDER)
    if ACTION == "save":
        gpt.train(model, optimizer, 2)
        gpt.add(result, "gpt", model, optimizer)
        save(manager, path)
    else:
        load(manager, FOLDER)
        gpt.add(result, "gpt", model, optimizer)
    result.facts["losses"] = gpt.train(model, optimizer, 2, first=2)
    leave_ranks(result)


if __name__ == "__main__":
    main()
