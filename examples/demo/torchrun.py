"""torchrun with the exit code of its workers: ``python -m examples.demo.torchrun ARGUMENTS``.

torchrun itself exits with 1 for any failed worker, which hides the exit code that asks for a restart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Run torchrun. Returns 0, or the exit code of the first failed worker (1 if a signal ended it)."""
    try:
        main(list(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return max(1, int(error.get_first_failure()[1].exitcode))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
