"""torchrun for a program that needs CUDA, on a CPU: `torchrun_on_cpu.py OPTION... SCRIPT ARGUMENT...`.

It starts itself as each rank. There it puts the stand-ins of `megatron_stubs` in place, and runs the script.
"""

from __future__ import annotations

import os
import runpy
import sys


def start() -> None:
    """Becomes torchrun, with this file before the script."""
    words = sys.argv[1:]
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    words.insert(script, os.path.abspath(__file__))
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])


def run() -> None:
    """Runs the script of the arguments as a rank."""
    import megatron_stubs

    megatron_stubs.install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo abort the process in the interpreter's teardown now and then


if __name__ == "__main__":
    run() if "RANK" in os.environ else start()
