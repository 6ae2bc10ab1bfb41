"""References of incremental saves, compared with a slow, obvious model: dicts of boxes and of bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.engine.format import FileRecord, Manifest, TensorRecord, manifest_version, shard_name
from shardproof.engine.planning import ChunkTable, WritePlan, chunk_table, plan_writes
from shardproof.engine.saving.base_chunks import Base, BaseDigests, match_base, place_with_base
from shardproof.engine.saving.commit import Committed, Placement
from shardproof.engine.saving.messages import WriteReport, pack_rows
from shardproof.errors import StructureError
from tests.unit.engine.planning.test_plans import Run, runs, slices

HEADER = 4096
Box = tuple[tuple[int, ...], tuple[int, ...]]


def box_of(table: ChunkTable | WritePlan, row: int) -> Box:
    return table.boxes.pair(row)


class Disk:
    """Steps that were saved: their manifests, tables, and the bytes of each file from its first byte on."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, int], bytes] = {}
        self.written = 0

    def save(
        self, number: int, run: Run, values: list[np.ndarray[Any, Any]], chunk_bytes: int, base: Base | None
    ) -> tuple[WritePlan, Placement, Manifest, ChunkTable]:
        """Saves as ranks and coordinator do. Chunks that the base has are not written."""
        plan = plan_writes(run.structures(), chunk_bytes=chunk_bytes)
        folder, attempt = f"step-{number:08d}", f"a{number}"
        reports = []
        self.written = 0
        for rank in range(len(run.held)):
            rows = range(int(plan.writer_start[rank]), int(plan.writer_start[rank + 1]))
            base_part = None if base is None else BaseDigests.decode(base.part(plan, rank).encode())
            chosen, digests, at = [], [], HEADER
            for own, row in enumerate(rows):
                offsets, sizes = box_of(plan, row)
                data = np.ascontiguousarray(values[int(plan.tensor[row])][slices((offsets, sizes))]).tobytes()
                assert len(data) == plan.byte_count[row]
                digests.append(xxhash.xxh3_128_digest(data))
                high, low = np.frombuffer(digests[-1], ">u8").tolist()
                same = (
                    base_part is not None
                    and base_part.known[own]
                    and base_part.digest[own].tolist() == [high, low]
                )
                chosen.append(not same)
                if not same:
                    self.bytes[f"{folder}/{shard_name(rank, attempt)}", at] = data
                    at += len(data)
                    self.written += len(data)
            columns = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).tobytes()
            size = at if any(chosen) else 0
            packed = b"" if all(chosen) else pack_rows(np.array(chosen, bool))
            reports.append(
                WriteReport(size, HEADER if size else 0, "", columns, {}, (), b"", {"incremental": packed})
            )
        placed = place_with_base(plan, reports, base)
        own = tuple(
            FileRecord(shard_name(rank, attempt), reports[rank].size, 32 * "0", HEADER, rank)
            for rank in placed.writers
        )
        files = (*own, *placed.referenced)
        described = zip(plan.merged.keys, plan.merged.dtypes, plan.merged.shapes, strict=True)
        manifest = Manifest(
            version=manifest_version(files),
            writer="test",
            attempt=attempt,
            step=number,
            time=0.0,
            world_size=len(run.held),
            metadata={},
            tensors=tuple(TensorRecord(key, dtype, tuple(shape)) for key, dtype, shape in described),
            aliases={},
            objects={},
            files=files,
            index=FileRecord(f"index-{attempt}.safetensors", 0, 32 * "0"),
        )
        assert all(plan.is_stored)
        table = chunk_table(
            plan.tensor,
            placed.file,
            placed.byte_start,
            plan.byte_count,
            placed.digest,
            plan.boxes.start,
            plan.boxes.offsets,
            plan.boxes.sizes,
        )
        return plan, placed, manifest, table

    def check(self, number: int, manifest: Manifest, table: ChunkTable, values: list[Any]) -> None:
        """Every chunk of a step lies where its table says, in a file of the folder that it says."""
        folder = f"step-{number:08d}"
        for row in range(len(table)):
            record = manifest.files[int(table.file[row])]
            where = f"{record.folder or folder}/{record.name}", int(table.byte_start[row])
            expected = np.ascontiguousarray(values[int(table.tensor[row])][slices(box_of(table, row))])
            if expected.size:
                assert self.bytes[where] == expected.tobytes()
            assert record.folder != folder and where[0].endswith(record.name)


DTYPES = {"bool": "u1", "bfloat16": "<u2", "float32": "<u4", "complex128": "<c16"}


def values_of(run: Run, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    return [
        rng.integers(0, 100, shape).astype(DTYPES[dtype])
        for shape, dtype in zip(run.shapes, run.dtypes, strict=True)
    ]


def boxes_with_bytes(
    manifest: Manifest, table: ChunkTable, values: list[Any]
) -> set[tuple[str, str, tuple[int, ...], Box, bytes]]:
    """All chunks of a step, with their bytes."""
    found = set()
    for row in range(len(table)):
        record, box = manifest.tensors[int(table.tensor[row])], box_of(table, row)
        data = np.ascontiguousarray(values[int(table.tensor[row])][slices(box)]).tobytes()
        found.add((record.key, record.dtype, tuple(record.shape), box, data))
    return found


@settings(max_examples=60)
@given(first=runs(), data=st.data(), chunk_bytes=st.integers(1, 64), seed=st.integers(0, 2**32 - 1))
def test_unchanged_chunks_are_references_and_all_others_are_written(
    first: Run, data: st.DataObject, chunk_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    disk = Disk()
    steps: list[tuple[int, Manifest, ChunkTable, list[Any]]] = []
    run, values, base = first, values_of(first, rng), None
    last: tuple[WritePlan, Placement, Manifest, ChunkTable] | None = None
    for number in range(1, 5):
        how = data.draw(st.sampled_from(["same", "some", "layout", "chunks"])) if number > 1 else "same"
        old_run, old_values = run, values
        if how == "some":
            values = [
                value + rng.integers(0, 2, value.shape).astype(value.dtype)
                if rng.random() < 0.5
                else value.copy()
                for value in values
            ]
        elif how == "layout":
            run = data.draw(runs())
            values = values_of(run, rng)
            pairs = zip(run.shapes, run.dtypes, old_run.shapes, old_run.dtypes, strict=False)
            for row, (shape, dtype, old_shape, old_dtype) in enumerate(pairs):
                if (shape, dtype) == (old_shape, old_dtype):
                    values[row] = old_values[row].copy()
        elif how == "chunks":
            chunk_bytes = data.draw(st.integers(1, 64))
        if last is not None:
            _, _, manifest, table = last
            plan = plan_writes(run.structures(), chunk_bytes=chunk_bytes)
            base = match_base(plan, manifest, table, f"step-{number - 1:08d}", b"seal")
        last = disk.save(number, run, values, chunk_bytes, base)
        plan, placed, manifest, table = last
        disk.check(number, manifest, table, values)
        if steps:
            known = boxes_with_bytes(*steps[-1][1:])
            now = boxes_with_bytes(manifest, table, values)
            assert disk.written == sum(len(chunk[-1]) for chunk in now - known)
        if how in ("same", "some") and number > 1:
            again = match_base(plan, manifest, table, f"step-{number:08d}", b"seal")
            cached = Base.of(Committed(manifest, placed, b"seal"), f"step-{number:08d}")
            solid = plan.byte_count > 0
            assert again.files == cached.files
            assert (again.file == cached.file)[solid].all() and (again.digest == cached.digest)[solid].all()
            assert (again.byte_start == cached.byte_start)[solid].all()
        steps.append((number, manifest, table, values))
    for step in steps:  # later saves leave earlier steps unchanged
        disk.check(*step)


@settings(max_examples=60)
@given(run=runs(), other=runs(), chunk_bytes=st.integers(1, 64))
def test_match_base_finds_the_same_chunks_as_a_dict_lookup(run: Run, other: Run, chunk_bytes: int) -> None:
    _, _, manifest, table = Disk().save(1, other, values_of(other, np.random.default_rng(0)), 16, None)
    plan = plan_writes(run.structures(), chunk_bytes=chunk_bytes)
    base = match_base(plan, manifest, table, "step-00000001", b"seal")
    rows: dict[Any, int] = {}
    for row in range(len(table)):
        record = manifest.tensors[int(table.tensor[row])]
        rows[record.key, record.dtype, tuple(record.shape), box_of(table, row)] = row
    merged = plan.merged
    for at in range(len(plan.tensor)):
        tensor = int(plan.tensor[at])
        what = merged.keys[tensor], merged.dtypes[tensor], tuple(merged.shapes[tensor]), box_of(plan, at)
        row = rows.get(what, -1)
        if plan.byte_count[at]:
            assert base.file[at] == (table.file[row] if row >= 0 else -1)
            assert row < 0 or base.digest[at].tolist() == table.digest[row].tolist()


def two_ranks() -> tuple[WritePlan, Base, list[WriteReport]]:
    """Two ranks with two chunks each. The base has all four; each rank wrote its second."""
    run = Run([(4,)], ["float32"], [[(0, ((0,), (2,)))], [(0, ((2,), (2,)))]])
    disk = Disk()
    first = np.arange(4, dtype="<u4")
    plan, placed, manifest, _ = disk.save(1, run, [first], 4, None)
    base = Base.of(Committed(manifest, placed, b"seal"), "step-00000001")
    second = first + np.array([0, 9, 0, 9], "<u4")
    digests = [
        np.frombuffer(xxhash.xxh3_128_digest(value.tobytes()), ">u8").astype("<u8").tobytes()
        for value in second
    ]
    rows = pack_rows(np.array([False, True]))
    written = [
        WriteReport(HEADER + 4, HEADER, "", digests[0] + digests[1], {}, (), b"", {"incremental": rows}),
        WriteReport(HEADER + 4, HEADER, "", digests[2] + digests[3], {}, (), b"", {"incremental": rows}),
    ]
    return plan, base, written


def test_a_chunk_that_was_not_written_must_be_in_the_base() -> None:
    plan, base, written = two_ranks()
    placed = place_with_base(plan, written, base)
    assert placed.file.tolist() == [2, 0, 3, 1]
    assert [record.place for record in placed.referenced] == [
        "step-00000001/shards/00000-a1.safetensors",
        "step-00000001/shards/00001-a1.safetensors",
    ]
    with pytest.raises(StructureError, match="rank 0 did not write a chunk of 't0'"):
        place_with_base(plan, written, None)
    lost = base.without([1], "step-00000009")
    with pytest.raises(StructureError, match="rank 1 did not write a chunk of 't0'"):
        place_with_base(plan, written, lost)
    itself = base.without([], "step-00000001")
    assert (itself.file == -1).all()
    forged = bytearray(written[1].digests)
    forged[0] ^= 1

    with pytest.raises(StructureError, match="rank 1 did not write"):
        place_with_base(plan, [written[0], msgspec.structs.replace(written[1], digests=bytes(forged))], base)


def test_reports_that_do_not_match_the_plan_are_refused() -> None:
    plan, base, written = two_ranks()

    for change in (
        {"digests": written[0].digests[:16]},
        {"options": {"incremental": b"\x01\x01"}},
        {"size": 0},
    ):
        with pytest.raises(StructureError, match="rank 0"):
            place_with_base(plan, [msgspec.structs.replace(written[0], **change), written[1]], base)
