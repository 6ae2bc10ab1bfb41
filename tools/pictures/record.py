"""Records what `make demo` prints: `python -m tools.pictures.record` takes one and a half minutes.

The recording is a file of the asciicast format, version 2: a line for each piece of output, with its time.
"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CAST = Path(__file__).with_name("demo.cast")
COLUMNS, ROWS = 120, 40


def record(command: list[str], cast: Path) -> int:
    """Runs a command in a terminal, writes its output, and returns its exit code."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | size, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    begin = time.monotonic()
    lines = [json.dumps({"version": 2, "width": COLUMNS, "height": ROWS})]
    pending = b""
    while True:
        select.select([ours], [], [], 600)
        try:
            pending += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        whole, _, pending = pending.rpartition(b"\n")
        if whole:
            text = whole.decode() + "\n"
            lines.append(json.dumps([round(time.monotonic() - begin, 1), "o", text], ensure_ascii=False))
    cast.write_text("\n".join(lines) + "\n")
    return process.wait()


if __name__ == "__main__":
    sys.exit(record([sys.executable, "-m", "examples.demo"], CAST))
