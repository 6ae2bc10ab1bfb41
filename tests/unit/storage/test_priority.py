"""Lower I/O priority, read back from the kernel."""

from __future__ import annotations

import ctypes
import platform
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardproof.storage import libc, lower_io_priority, priority

GET_NUMBERS = {
    "x86_64": 252,
    "aarch64": 31,
    "riscv64": 31,
    "loongarch64": 31,
    "ppc64le": 274,
    "s390x": 283,
}
BEST_EFFORT_LOWEST = (2 << 13) | 7


def priority_of_this_thread() -> int:
    number = GET_NUMBERS[platform.machine()]
    found = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), ctypes.c_int(1), ctypes.c_int(0))
    assert found >= 0, ctypes.get_errno()
    return int(found)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in GET_NUMBERS, reason="no I/O priorities here"
)
def test_only_the_calling_thread_yields() -> None:
    before = priority_of_this_thread()
    with ThreadPoolExecutor(1) as other:
        took_effect = other.submit(lower_io_priority).result(30)
        after = other.submit(priority_of_this_thread).result(30)
    if not took_effect:
        pytest.skip("a sandbox forbids it")
    assert after == BEST_EFFORT_LOWEST
    assert priority_of_this_thread() == before != after


def test_every_machine_whose_number_is_known_is_read_back() -> None:
    assert {machine: number - 1 for machine, number in GET_NUMBERS.items()} == priority._SET_NUMBERS


@pytest.mark.parametrize("elsewhere", ["system", "machine", "sandbox"])
def test_elsewhere_nothing_happens(elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(name: str, *arguments: object) -> None:
        assert elsewhere == "sandbox"
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(libc, "call", call)
    if elsewhere == "system":
        monkeypatch.setattr(sys, "platform", "darwin")
    if elsewhere == "machine":
        monkeypatch.setattr(platform, "machine", lambda: "unheard-of")
    assert lower_io_priority() is False
