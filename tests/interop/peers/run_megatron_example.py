"""Runs examples/megatron.py on the CPU: `run_megatron_example.py EXAMPLE KILL_AT RUN STEPS TP`.

KILL_AT is the step after which rank 0 kills itself; 0 for none. Facts: the losses by step.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
from typing import Any

import megatron_stubs
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks, rank

megatron_stubs.install()


def main() -> None:
    example, kill_at, *arguments = sys.argv[1:]
    join_ranks()
    result = Result()
    result.facts["losses"] = {}
    show = builtins.print

    def record(text: Any = "", *more: Any, **options: Any) -> None:
        show(text, *more, **options)
        if str(text).startswith("step "):
            step, loss = str(text).removeprefix("step ").split(": loss ")
            result.facts["losses"][step] = loss
            if step == kill_at and rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group = lambda *args, **options: None  # the ranks have joined
    builtins.print = record
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")
    leave_ranks(result)


if __name__ == "__main__":
    main()
