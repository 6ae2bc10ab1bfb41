"""The start time of the command line: processor and elapsed time of whole processes, in turn.

The limit is Python that does nothing. `import torch` is measured too; help and version do not need it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from common import machine, table
from recording import STDOUT, json_option, record

MODULE = ("-m", "shardproof")
WAYS: dict[str, tuple[str, ...]] = {
    "Python, nothing": ("-c", "pass"),
    "import shardproof": ("-c", "import shardproof"),
    "shardproof --help": (*MODULE, "--help"),
    "shardproof verify --help": (*MODULE, "verify", "--help"),
    "shardproof --version": (*MODULE, "--version"),
    "import torch": ("-c", "import torch"),
}


def measure(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Processor and elapsed seconds of one process."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, timeout=300, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return worked, time.perf_counter() - began


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--repeats", type=int, default=15, help="measured rounds (default 15)")
    json_option(options)
    chosen = options.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(1 + chosen.repeats):  # the first reads the files from the disk
        for name, arguments in WAYS.items():
            found = measure(arguments)
            if number:
                times[name].append(found)
    medians = {
        name: tuple(statistics.median(one[kind] for one in found) for kind in range(2))
        for name, found in times.items()
    }
    if chosen.json == STDOUT:
        print(json.dumps({"title": "start of a process", "machine": machine(), "rows": medians}))
        return
    record(
        chosen.json,
        "start of a process",
        [
            (f"{name}: {kind}", "s", [one[at] for one in found])
            for name, found in times.items()
            for at, kind in enumerate(("processor", "elapsed"))
        ],
    )
    print(f"\n### Start of a process, {chosen.repeats} rounds\n\n{machine()}\n")
    titles = ("process", "processor, median ms", "elapsed, median ms")
    rows = [(name, f"{1e3 * worked:.0f}", f"{1e3 * took:.0f}") for name, (worked, took) in medians.items()]
    table(titles, rows)


if __name__ == "__main__":
    main()
