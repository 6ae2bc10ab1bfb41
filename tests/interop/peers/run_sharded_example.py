"""Runs an example of a framework that needs CUDA on the CPU: `run_sharded_example.py PATH LAST_STEP ARGS...`.

The example prints a line that begins with `step` on every rank. After step LAST_STEP the rank ends itself by
SIGKILL; with 0 it runs to its end. The facts of the result are these lines of rank 0, and all others that it
printed.
"""

from __future__ import annotations

import builtins
import importlib
import os
import runpy
import signal
import sys
from typing import Any

import cpu_stubs
import megatron_stubs
import offload_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks


def on_cpu(example: str) -> None:
    """Lets the framework of an example run without CUDA."""
    if example == "megatron_fsdp.py":
        if "offload" in sys.argv:
            megatron_stubs.install(fused=False)
            offload_stubs.install()
        cpu_stubs.install(current_device=0)
        torch.cuda.is_available = lambda: False
    elif example == "deepspeed_zero.py":
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed")
        # The operator is compiled, and a rank that is killed meanwhile leaves a lock.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


def main() -> None:
    path, last_step, *arguments = sys.argv[1:]
    join_ranks()
    dist.init_process_group = lambda *args, **options: None
    on_cpu(os.path.basename(path))
    lines: list[str] = []
    other: list[str] = []
    write = builtins.print

    def printed(*values: Any, **options: Any) -> None:
        line = " ".join(map(str, values))
        write(line, flush=True)
        if line.startswith("step"):
            lines.append(line)
            if int(line.split()[1]) == int(last_step):
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            other.append(line)

    builtins.print = printed
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    result = Result()
    result.facts |= {"lines": lines, "other": other}
    leave_ranks(result)


if __name__ == "__main__":
    main()
