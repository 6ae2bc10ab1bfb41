"""Runs another script as it is: `start_example.py N SCRIPT ARGUMENT...`.

If N is not 0, the process kills itself in its N-th save, when it has written its file and nothing is
committed. Otherwise it ends as soon as the script does: in the interpreter's teardown, threads of gloo abort
the process now and then.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import shardproof as sp


def main() -> None:
    number, script = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    saves: set[str] = set()

    def kill_within(event: sp.events.Event) -> None:
        if event.operation.startswith("save ") and (event.phase, event.kind) == ("write", "end"):
            saves.add(event.operation)
            if len(saves) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sp.events.subscribe(kill_within)
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
