"""The command line: ``shardproof`` and ``python -m shardproof``.

Exit codes: 0 yes; 1 the checkpoint is bad (for diff: they differ); 2 bad usage; 3 an unexpected failure,
which says nothing about the checkpoint; 130 interrupted; 141 the reader closed the output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits the process with its exit code.

    Args:
        arguments: the arguments without the program's name; None for those of this process.
    """
    # Imported here so that `shardproof.cli` itself costs nothing.
    from shardproof.commands.cli.group import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
