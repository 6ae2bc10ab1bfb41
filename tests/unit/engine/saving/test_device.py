"""Copies of device memory: what is copied, in which order, and what each waits for.

Without an accelerator, the tests use streams that only log their calls.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof._utils.libc import address
from shardproof.engine.saving.snapshot import Snapshot
from shardproof.engine.saving.staging import DeviceCopies, SliceSource, copies_of, pinned_buffer
from shardproof.state import Piece
from shardproof.storage import ALIGNMENT
from tests.accelerator import first_device, late_one
from tests.logging_streams import LoggingStream, streams_that_log

SAMPLES = {
    "contiguous": lambda: torch.randn(5, 7),
    "scalar": lambda: torch.tensor(3.5, dtype=torch.float64),
    "transposed": lambda: torch.randn(6, 4).T,
    "strided": lambda: torch.arange(120).reshape(10, 12)[1::3, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(9).bfloat16()[::2],
    "float8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False, True]),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3, 3)),
    "empty": lambda: torch.empty(0, 3),
    "one element of a column": lambda: torch.randn(3, 2)[:1, 0],
    "one expanded element": lambda: torch.tensor(2.5).expand(1),
}


def expected_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()) if plain.numel() else b""


def copied(copies: DeviceCopies, tensor: torch.Tensor, shift: int = 0) -> bytes:
    memory = memoryview(bytearray(b"\xee" * (shift + tensor.numel() * tensor.element_size() + 8)))
    copies.copy(tensor, memory[shift:-8])
    assert bytes(memory[:shift]) + bytes(memory[-8:]) == b"\xee" * (shift + 8)
    return bytes(memory[shift:-8])


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("shift", [0, 1])
def test_elements_arrive_in_row_major_order(sample: str, shift: int) -> None:
    tensor = SAMPLES[sample]()
    assert copied(DeviceCopies(tensor.device), tensor, shift) == expected_bytes(tensor)


def test_memory_given_by_its_address_is_filled() -> None:
    buffer = pinned_buffer(64)
    whole = memoryview((ctypes.c_char * 32).from_address(address(buffer) + 16)).cast("B")
    DeviceCopies(torch.device("cpu")).copy(torch.arange(4), whole)
    assert torch.frombuffer(buffer[16:48], dtype=torch.int64).tolist() == [0, 1, 2, 3]


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError):
        DeviceCopies(torch.device("cpu")).copy(torch.zeros(4), memoryview(bytearray(15)))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return streams_that_log(monkeypatch)


def test_the_side_stream_waits_for_main_and_the_host_for_each_copy(log: list[str]) -> None:
    source = torch.arange(12).reshape(3, 4).T
    copies = DeviceCopies(source.device)
    assert log == ["mark on main", "side waits for main's mark"]
    log.clear()
    memory = memoryview(bytearray(96))
    copies.copy(source, memory)
    assert log == [
        "device",
        "layout on side",
        "copy on side",
        "mark on side",
        "device back",
        "host waits for side's mark",
    ]
    assert torch.accelerator.current_stream().name == "main"
    assert torch.frombuffer(memory, dtype=torch.int64).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    log.clear()
    copies.wait()
    assert log == ["host waits for side"]


def test_main_is_current_again_after_an_error(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    copies = DeviceCopies(torch.device("cpu"))

    def fail(self: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "contiguous", fail)
    with pytest.raises(torch.OutOfMemoryError):
        copies.copy(torch.zeros(4, 2).T, memoryview(bytearray(32)))
    assert torch.accelerator.current_stream().name == "main"


def test_threads_keep_their_current_streams(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads are inside `copy` at once. Each restores its own stream."""
    copies = DeviceCopies(torch.device("cpu"))
    inside = threading.Barrier(2, timeout=30)
    original = torch.Tensor.resolve_conj

    def meet(self: torch.Tensor) -> torch.Tensor:
        inside.wait()
        return original(self)

    monkeypatch.setattr(torch.Tensor, "resolve_conj", meet)

    def work(number: int) -> str:
        torch.accelerator.set_stream(LoggingStream(log, f"own {number}"))  # type: ignore[arg-type]
        copies.copy(torch.zeros(4), memoryview(bytearray(16)))
        return str(torch.accelerator.current_stream().name)  # type: ignore[attr-defined]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == ["own 0", "own 1"]
    assert log.count("copy on side") == 2


def test_an_accelerator_without_streams_makes_blocking_copies(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    copies = DeviceCopies(torch.device("cpu"))
    copies.copy(torch.zeros(4), memoryview(bytearray(16)))
    copies.wait()
    assert log == ["copy on main, blocking"]


@pytest.mark.parametrize("nbytes", [0, 1, ALIGNMENT, 3 * ALIGNMENT + 5])
def test_pinned_buffers_are_writable_and_start_on_a_page(nbytes: int) -> None:
    buffer = pinned_buffer(nbytes)
    assert len(buffer) == nbytes and not buffer.readonly and buffer.format == "B"
    assert address(buffer) % ALIGNMENT == 0
    buffer[:] = bytes(nbytes)


class TestLocking:
    @pytest.fixture
    def locked_sizes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Sizes of the page-locked allocations. None of them starts on a page."""
        sizes: list[int] = []

        def empty(count: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
            assert pin_memory and device == "cpu"
            sizes.append(count)
            memory = torch.frombuffer(bytearray(count + 2 * ALIGNMENT), dtype=dtype)
            skip = -memory.data_ptr() % ALIGNMENT + 8
            return memory[skip : skip + count]

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
        return sizes

    def test_memory_that_does_not_start_on_a_page_is_cut_to_one(self, locked_sizes: list[int]) -> None:
        buffer = pinned_buffer(10_000)
        assert locked_sizes == [10_000, 10_000 + ALIGNMENT]
        assert len(buffer) == 10_000 and address(buffer) % ALIGNMENT == 0

    def test_an_accelerator_that_is_not_used_is_left_alone(
        self, locked_sizes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unused = SimpleNamespace(is_initialized=lambda: False)
        monkeypatch.setattr(torch, "get_device_module", lambda device: unused)
        assert len(pinned_buffer(10_000)) == 10_000
        assert locked_sizes == []

    def test_memory_that_cannot_be_locked_is_used_unlocked(
        self, locked_sizes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object, **options: object) -> torch.Tensor:
            raise RuntimeError("cannot lock pages")

        monkeypatch.setattr(torch, "empty", refuse)
        assert len(pinned_buffer(10_000)) == 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("sample", SAMPLES)
def test_device_elements_arrive_in_row_major_order(sample: str) -> None:
    with torch.device(first_device()):
        tensor = SAMPLES[sample]()
    assert tensor.device == first_device()
    assert copied(DeviceCopies(tensor.device), tensor) == expected_bytes(tensor)


@pytest.mark.gpu
def test_copies_have_the_values_at_the_start_of_the_save_while_training_runs() -> None:
    device = first_device()
    weight = torch.zeros(1 << 20, device=device)
    for step in range(20):
        late_one(device, 10, 2048)
        weight.fill_(step)  # enqueued behind the products, hence late
        copies = DeviceCopies(device)
        buffer = pinned_buffer(weight.numel() * 4)
        with ThreadPoolExecutor(1) as background:
            background.submit(copies.copy, weight, buffer).result(60)
        weight.fill_(-1)  # what the next step does, after the fence
        found = torch.frombuffer(buffer, dtype=torch.float32)
        assert (found == step).all()
        copies.wait()


@pytest.mark.gpu
def test_temporaries_of_many_copies_do_not_mix() -> None:
    device = first_device()
    sources = [torch.randn(512, 256 + number, device=device).T for number in range(16)]
    copies = DeviceCopies(device)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda source: copied(copies, source), sources))
    assert found == [expected_bytes(source) for source in sources]


@pytest.mark.gpu
@pytest.mark.parametrize("has_room", [True, False])
def test_small_tensors_are_copied_together(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = first_device()
    with device:
        sources = [sample() for sample in SAMPLES.values()]
    ends = np.cumsum([64 + source.nbytes for source in sources]).tolist()
    starts = [end - source.nbytes for end, source in zip(ends, sources, strict=True)]
    buffer = pinned_buffer(ends[-1])
    copies = DeviceCopies(device)
    if not has_room:
        monkeypatch.setattr(torch, "empty", raise_out_of_memory)
    enqueued = list[int]()
    monkeypatch.setattr(DeviceCopies, "enqueue", record_calls(DeviceCopies.enqueue, enqueued))
    copies.enqueue_together(sources, starts, buffer)
    copies.wait()
    for source, start in zip(sources, starts, strict=True):
        assert bytes(buffer[start : start + source.nbytes]) == expected_bytes(source)
    assert len(enqueued) == (0 if has_room else len(sources))


def could_lock(lock: threading.Condition) -> bool:
    """True if no other thread has the lock."""
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


def raise_out_of_memory(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError


def record_calls(method: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def recorded(*args: Any) -> Any:
        calls.append(len(calls))
        return method(*args)

    return recorded


@pytest.mark.gpu
def test_a_save_copies_small_tensors_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {str(at): torch.randn(at, device=first_device()) for at in range(40)}
    copied_alone = list[int]()
    monkeypatch.setattr(DeviceCopies, "enqueue", record_calls(DeviceCopies.enqueue, copied_alone))
    sp.save(tmp_path / "c", state)
    assert not copied_alone
    target = {key: torch.full_like(value, -1) for key, value in state.items()}
    sp.load(tmp_path / "c", target)
    assert all(torch.equal(target[key], value) for key, value in state.items())


@pytest.mark.gpu
def test_no_chunk_is_written_whose_copy_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save has failed before the writer can take the memory that was not filled."""
    state = {str(at): torch.full((8,), float(at), device=first_device()) for at in range(5)}
    fail_save, is_free = Snapshot.fail, list[bool]()

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    def check(snapshot: Snapshot, error: BaseException) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            with ThreadPoolExecutor(1) as other:
                is_free.append(other.submit(could_lock, snapshot._changed).result(60))
        fail_save(snapshot, error)

    monkeypatch.setattr(DeviceCopies, "enqueue_together", fail)
    monkeypatch.setattr(Snapshot, "fail", check)
    checkpointer = sp.Checkpointer(tmp_path, snapshot="stage")
    with pytest.raises(sp.ShardproofError, match="no room"):
        checkpointer.save(1, state).result(60)
    assert is_free[0] is False  # the staging thread still had the lock
    assert checkpointer.steps() == []


@pytest.mark.gpu
def test_memory_that_was_freed_before_the_save_read_it_is_not_copied() -> None:
    views = [torch.ones(4, device=first_device()) for _ in range(3)]
    pieces = [Piece.of(view, (0,), (4,)) for view in views]
    views[1].untyped_storage().resize_(0)
    ones, copies = np.ones(3, np.int64), copies_of(views)
    source = SliceSource(pieces, np.arange(3), ones * 0, ones * 16, ones * 0, ones * 4, copies)
    assert [source.is_in_place(row) for row in range(3)] == [True, False, True]


@pytest.mark.gpu
def test_one_copy_fills_one_allocation() -> None:
    """Page-locked memory of two allocations may be adjacent, but a device may refuse a copy to both."""
    views = [torch.full((16,), float(at), device=first_device()) for at in range(4)]
    pieces = [Piece.of(view, (0,), (16,)) for view in views]
    ones, copies = np.ones(4, np.int64), copies_of(views)
    source = SliceSource(pieces, np.arange(4), ones * 0, ones * 64, ones * 0, ones * 16, copies)
    buffer, sent = pinned_buffer(256), list[int]()
    enqueue = DeviceCopies.enqueue_together

    def record(copies: DeviceCopies, *args: Any) -> None:
        sent.append(len(args[-1]))
        enqueue(copies, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceCopies, "enqueue_together", record)
        for row, segment in enumerate(("first", "first", "first", "second")):
            source.read(row, address(buffer) + 64 * row, wait=False, segment=segment)
        assert source.wait() == []
    assert sent == [192, 64]
    assert torch.frombuffer(buffer, dtype=torch.float32).view(4, 16).unique(dim=1).flatten().tolist() == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("snapshot", ["fence", "stage"])
def test_a_tensor_that_is_freed_before_its_copy_fails_the_save(
    snapshot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that reads freed memory would end the use of the device by this process."""
    state = {str(at): torch.full((8,), float(at), device=first_device()) for at in range(5)}
    enqueue = DeviceCopies.enqueue_together

    def free_first(source: SliceSource) -> None:
        if source._small is not None:
            state["2"].untyped_storage().resize_(0)
        copy_small(source)

    def check(copies: DeviceCopies, sources: Sequence[torch.Tensor], *where: Any) -> None:
        assert all(source.untyped_storage().nbytes() for source in sources)
        enqueue(copies, sources, *where)

    copy_small = SliceSource._copy_small
    monkeypatch.setattr(SliceSource, "_copy_small", free_first)
    monkeypatch.setattr(DeviceCopies, "enqueue_together", check)
    checkpointer = sp.Checkpointer(tmp_path, snapshot=snapshot)
    with pytest.raises(sp.StructureError, match="2 was changed while it was being saved"):
        checkpointer.save(1, state).result(60)
    assert checkpointer.steps() == []


@pytest.mark.gpu
def test_page_locked_memory_is_page_locked() -> None:
    torch.zeros(1, device=first_device())
    assert torch.frombuffer(pinned_buffer(1 << 20), dtype=torch.uint8).is_pinned()
