"""Runs an example of a framework that needs CUDA on the CPU: `run_sharded_example.py PATH LAST_STEP ARGS...`.

The example prints a line that begins with `step` on every rank. After step LAST_STEP the rank ends itself by
SIGKILL; with 0 it runs to its end. The facts of the result are the lines of rank 0.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
from typing import Any

import cpu_stubs
import torch
import torch.distributed as dist
from peer_result import Result, join_ranks, leave_ranks

DEVICES = {"megatron_fsdp.py": 0}
"""What `torch.cuda.current_device` must be for an example that needs CUDA."""


def main() -> None:
    path, last_step, *arguments = sys.argv[1:]
    join_ranks()
    dist.init_process_group = lambda *args, **options: None
    if os.path.basename(path) in DEVICES:
        cpu_stubs.install(DEVICES[os.path.basename(path)])
        torch.cuda.is_available = lambda: False
    lines: list[str] = []
    write = builtins.print

    def printed(*values: Any, **options: Any) -> None:
        line = " ".join(map(str, values))
        write(line, flush=True)
        if line.startswith("step"):
            lines.append(line)
            if int(line.split()[1]) == int(last_step):
                os.kill(os.getpid(), signal.SIGKILL)

    builtins.print = printed
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    result = Result()
    result.facts["lines"] = lines
    leave_ranks(result)


if __name__ == "__main__":
    main()
