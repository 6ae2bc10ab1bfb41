"""Saves a module while Megatron-Core divides models among 2 tensor parallel ranks: `... FOLDER`.

Fact `error`: what the save of a module with a divided weight raises. `megatron_stubs` takes the
place of triton and of calls of CUDA.
"""

from __future__ import annotations

import sys
from pathlib import Path

import megatron_stubs
import torch
from peer_result import Result, join_ranks, leave_ranks

megatron_stubs.install()

from megatron.core import parallel_state  # noqa: E402

import shardproof as sp  # noqa: E402


def main() -> None:
    folder = Path(sys.argv[1])
    join_ranks()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    result = Result()
    module = torch.nn.Linear(2, 2)
    sp.save(folder / "whole", {"model": module})
    module.weight.tensor_model_parallel = True  # type: ignore[assignment]
    try:
        sp.save(folder / "divided", {"model": module})
    except sp.ShardproofError as error:
        result.facts["error"] = str(error)
    leave_ranks(result)


if __name__ == "__main__":
    main()
