"""The option `--json` of every benchmark, and files of results.

This module does not import torch, because some benchmarks measure processes that do not import it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

STDOUT = "-"
"""The value of `--json` without a file."""


def json_option(options: argparse.ArgumentParser) -> None:
    """The option for figures as JSON: printed, or added to a file (see `record`)."""
    options.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="print the figures as JSON; with FILE print the table, and add the figures to the file",
    )


def record(target: str | None, question: str, figures: Iterable[tuple[str, str, Sequence[float]]]) -> None:
    """Adds the answer to one question to a file of results, a JSON array. Called by one process.

    Args:
        target: the value of `--json`; nothing is written without a file.
        question: what was measured, on how much.
        figures: name, unit and measured values of each.
    """
    if target is None or target == STDOUT:
        return
    from common import machine

    path = Path(target)
    answers = json.loads(path.read_text()) if path.exists() else []
    answers.append(
        {
            "question": question,
            "command": shlex.join([Path(sys.argv[0]).name, *_without_target(sys.argv[1:], target)]),
            "figures": [
                {"name": name, "unit": unit, "median": statistics.median(values), "values": list(values)}
                for name, unit, values in figures
                if values
            ],
            "machine": machine(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.tmp")
    written.write_text(json.dumps(answers, indent=1) + "\n")
    written.replace(path)


def _without_target(arguments: Sequence[str], target: str) -> list[str]:
    """The arguments without `--json` and its file: what was measured does not depend on them."""
    return [part for part in arguments if part not in ("--json", target, f"--json={target}")]


def commit() -> str:
    """The commit of the repository that this file is in, with "-dirty" where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
