"""Two processes write their flat ranges of one Zarr chunk: `seed_shared_chunk.py FOLDER`.

Fact `lost`: elements that read as zero, though each was written as one without an error. It repeats until
some are lost.
"""

from __future__ import annotations

import multiprocessing
import sys
from importlib.metadata import version
from typing import Any

import zarr
from peer_result import Result

CHUNKS, ELEMENTS, ROUNDS = 40, 1 << 14, 100


def write(folder: str, half: int, together: Any) -> None:
    """Writes the first or the second half of every chunk."""
    array = zarr.open_array(folder, mode="r+")
    first = half * ELEMENTS // 2
    for chunk in range(CHUNKS):
        together.wait()
        array[chunk * ELEMENTS + first : chunk * ELEMENTS + first + ELEMENTS // 2] = 1


def main() -> None:
    folder = sys.argv[1]
    lost = 0
    for _ in range(ROUNDS):
        zarr.create_array(
            folder, shape=(CHUNKS * ELEMENTS,), chunks=(ELEMENTS,), dtype="f4", fill_value=0, overwrite=True
        )
        context = multiprocessing.get_context("spawn")
        together = context.Barrier(2, timeout=60)
        writers = [context.Process(target=write, args=(folder, half, together)) for half in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
            assert writer.exitcode == 0
        lost = int((zarr.open_array(folder, mode="r")[:] == 0).sum())
        if lost:
            break
    result = Result()
    result.facts |= {"lost": lost, "version": version("zarr")}
    result.write()


if __name__ == "__main__":
    main()
