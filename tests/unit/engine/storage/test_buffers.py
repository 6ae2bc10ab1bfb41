"""The pages of aligned buffers are mapped before the first write."""

from __future__ import annotations

import errno
import resource

import pytest

from shardproof._utils import libc
from shardproof._utils.libc import address
from shardproof.storage import ALIGNMENT, aligned_buffer

NBYTES = 16 << 20


def faults_of_filling(buffer: memoryview) -> int:
    """The page faults of a write to the whole buffer."""
    source = b"\1" * len(buffer)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    buffer[:] = source
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("kernel", ["this one", "an older one"])
def test_pages_are_mapped_before_the_first_write(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "an older one":

        def refuse(name: str, *arguments: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(libc, "call", refuse)
    buffer = aligned_buffer(NBYTES)
    assert faults_of_filling(buffer) < NBYTES // (2 << 20), "not even one for each huge page"
    assert address(buffer) % ALIGNMENT == 0 and len(buffer) == NBYTES


def test_lengths_need_not_be_whole_pages() -> None:
    assert [len(aligned_buffer(nbytes)) for nbytes in (0, 1, ALIGNMENT + 1)] == [0, 1, ALIGNMENT + 1]
    with pytest.raises(ValueError, match="-1"):
        aligned_buffer(-1)
