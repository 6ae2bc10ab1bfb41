"""Plans against a slow, obvious reference: arrays that hold their own global element numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.dtypes import DTYPES
from shardproof.engine.format import TensorRecord
from shardproof.engine.planning import (
    ChunkTable,
    RequestedBoxes,
    Structure,
    TensorTable,
    WritePlan,
    plan_reads,
    plan_writes,
    write_plan,
)
from shardproof.errors import StructureError, TilingError

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class Run:
    """Tensors of one run, and the boxes that each rank holds of each."""

    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    held: list[list[tuple[int, Box]]]

    def structures(self) -> list[Structure]:
        keys = tuple(f"t{row}" for row in range(len(self.shapes)))
        table = TensorTable(keys, tuple(self.dtypes), tuple(self.shapes), ("",) * len(keys))
        return [
            Structure.build(
                table,
                ["note"],
                [row for row, _ in held],
                [value for _, (offsets, _) in held for value in offsets],
                [value for _, (_, sizes) in held for value in sizes],
            )
            for held in self.held
        ]

    def values(self, row: int) -> np.ndarray:
        """Every element is its own number."""
        return np.arange(np.prod(self.shapes[row], dtype=int)).reshape(self.shapes[row])


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """An irregular tiling: the tensor is cut in two again and again."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at]
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        first = draw(st.integers(1, sizes[dim] - 1))
        upper = (offsets, (*sizes[:dim], first, *sizes[dim + 1 :]))
        lower = (
            (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
            (*sizes[:dim], sizes[dim] - first, *sizes[dim + 1 :]),
        )
        boxes[at : at + 1] = [upper, lower]
    return boxes


@st.composite
def runs(draw: st.DrawFn) -> Run:
    world_size = draw(st.integers(1, 4))
    shapes, dtypes = [], []
    held: list[list[tuple[int, Box]]] = [[] for _ in range(world_size)]
    for row in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
        shapes.append(shape)
        dtypes.append(draw(st.sampled_from(["bool", "bfloat16", "float32", "complex128"])))
        for box in draw(boxes_of(shape)):
            for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
                held[rank].append((row, box))
    return Run(shapes, dtypes, held)


def written(run: Run, plan: WritePlan) -> tuple[ChunkTable, list[np.ndarray]]:
    """Writes files by the plan. Each file is an array of element numbers."""
    files = []
    parts = plan.rank_plans()
    for rank, part in enumerate(parts):
        file = []
        for piece, start, count in zip(part.piece, part.piece_start, part.byte_count, strict=True):
            row, box = run.held[rank][piece]
            flat = run.values(row)[slices(box)].ravel()
            elements = count // plan.merged.itemsizes[row]
            file.append(flat[start : start + elements])
        files.append(np.concatenate(file) if file else np.zeros(0, int))
    return (
        ChunkTable(
            plan.tensor,
            np.repeat(np.arange(len(parts)), np.diff(plan.writer_start)),
            plan.byte_start,
            plan.byte_count,
            np.zeros((len(plan.tensor), 2), np.uint64),
            plan.boxes.start,
            plan.boxes.offsets,
            plan.boxes.sizes,
        ),
        files,
    )


@given(run=runs(), chunk_bytes=st.integers(1, 64), data=st.data())
def test_every_element_is_written_once_where_the_plan_says(
    run: Run, chunk_bytes: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.none() | st.lists(st.integers(0, 1), min_size=len(run.held), max_size=len(run.held)))
    plan = plan_writes(run.structures(), chunk_bytes=chunk_bytes, nodes=nodes)
    table, files = written(run, plan)
    seen = [np.zeros(shape, int) for shape in run.shapes]
    position = [0] * len(files)
    for at in range(len(table)):
        row, file = int(table.tensor[at]), int(table.file[at])
        span = slice(table.box_start[at], table.box_start[at + 1])
        box = (tuple(table.box_offsets[span]), tuple(table.box_sizes[span]))
        expected = run.values(row)[slices(box)].ravel()
        found = files[file][position[file] : position[file] + expected.size]
        position[file] += expected.size
        assert found.tolist() == expected.tolist()
        itemsize = int(plan.merged.itemsizes[row])
        assert table.byte_count[at] == expected.size * itemsize
        assert table.byte_count[at] <= max(chunk_bytes, itemsize)
        assert table.byte_start[at] % min(itemsize, 8) == 0
        seen[row][slices(box)] += 1
    assert all((counts == 1).all() for counts in seen)
    for file in range(len(files)):
        rows = np.flatnonzero(table.file == file)
        ends = np.append(0, np.cumsum(table.byte_count[rows]))
        assert table.byte_start[rows].tolist() == ends[:-1].tolist(), "a file has gaps"


@given(run=runs(), chunk_bytes=st.integers(1, 64), large=st.integers(1, 64))
def test_a_file_has_small_tensors_before_large_ones_of_their_alignment(
    run: Run, chunk_bytes: int, large: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_plan, "LARGE_BYTES", large)
        plan = plan_writes(run.structures(), chunk_bytes=chunk_bytes)
    table, files = written(run, plan)
    largest = [int(table.byte_count[table.tensor == row].max(initial=0)) for row in range(len(run.shapes))]
    for file in range(len(files)):
        found = table.tensor[table.file == file].tolist()
        places = [(-DTYPES[plan.merged.dtypes[row]].alignment, largest[row] >= large, row) for row in found]
        assert places == sorted(places)


@given(run=runs(), chunk_bytes=st.integers(1, 64), data=st.data())
def test_a_requested_box_is_read_from_the_chunks_that_have_its_elements(
    run: Run, chunk_bytes: int, data: st.DataObject
) -> None:
    plan = plan_writes(run.structures(), chunk_bytes=chunk_bytes)
    table, _ = written(run, plan)
    order = np.argsort(table.tensor, kind="stable")
    # plan_reads takes the table sorted by tensor, as the index is.
    spans = [slice(table.box_start[at], table.box_start[at + 1]) for at in order]
    table = ChunkTable(
        table.tensor[order],
        table.file[order],
        table.byte_start[order],
        table.byte_count[order],
        table.digest[order],
        np.append(0, np.cumsum([span.stop - span.start for span in spans])).astype(np.int64),
        np.concatenate([table.box_offsets[span] for span in spans] or [np.zeros(0, np.int64)]),
        np.concatenate([table.box_sizes[span] for span in spans] or [np.zeros(0, np.int64)]),
    )
    wants: list[tuple[int, Box]] = []
    for _ in range(data.draw(st.integers(0, 4))):
        row = data.draw(st.integers(0, len(run.shapes) - 1))
        edges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in run.shapes[row]]
        wants.append((row, (tuple(a for a, _ in edges), tuple(b - a for a, b in edges))))
    reads = plan_reads(
        [
            TensorRecord(key, "int64", tuple(shape))
            for key, shape in zip(plan.merged.keys, run.shapes, strict=True)
        ],
        table,
        RequestedBoxes(
            np.array([row for row, _ in wants], np.int64),
            np.array([value for _, (offsets, _) in wants for value in offsets], np.int64),
            np.array([value for _, (_, sizes) in wants for value in sizes], np.int64),
        ),
    )
    results = [np.full(box[1], -1) for _, box in wants]
    for part in range(len(reads.chunk)):
        chunk, want = int(reads.chunk[part]), int(reads.requested[part])
        row, box = wants[want]
        ndim = len(run.shapes[row])
        span = slice(table.box_start[chunk], table.box_start[chunk + 1])
        stored = run.values(row)[slices((table.box_offsets[span], table.box_sizes[span]))]
        sizes = reads.sizes[part][:ndim]
        source = stored[slices((reads.in_chunk[part][:ndim], sizes))]
        target = slices((reads.in_requested[part][:ndim], sizes))
        assert (results[want][target] == -1).all(), "an element is read twice"
        results[want][target] = source
        elements = np.arange(stored.size).reshape(stored.shape)
        held = elements[slices((reads.in_chunk[part][:ndim], sizes))].ravel()
        assert (int(reads.chunk_start[part]), int(reads.chunk_stop[part])) == (held[0], held[-1] + 1)
        start = int(reads.requested_start[part])
        numbered = np.arange(np.prod(box[1], dtype=int)).reshape(box[1])[target].ravel()
        is_contiguous = (np.diff(numbered) == 1).all()
        assert (start >= 0) == is_contiguous
        if is_contiguous:
            assert start == numbered[0]
    for (row, box), result in zip(wants, results, strict=True):
        assert result.tolist() == run.values(row)[slices(box)].tolist()


def test_replicas_are_divided_by_bytes() -> None:
    shapes = [(64,)] * 6
    whole = [(row, ((0,), (64,))) for row in range(6)]
    plan = plan_writes(Run(shapes, ["float32"] * 6, [whole, whole, whole]).structures(), chunk_bytes=256)
    assert [int(part.byte_count.sum()) for part in plan.rank_plans()] == [512, 512, 512]


def test_each_holder_of_a_large_replica_writes_one_contiguous_part() -> None:
    run = Run([(64, 4)], ["float32"], [[(0, ((0, 0), (64, 4)))]] * 4)
    parts = plan_writes(run.structures(), chunk_bytes=64).rank_plans()
    assert [int(part.byte_count.sum()) for part in parts] == [256] * 4
    assert [part.piece_start.tolist() for part in parts] == [
        list(range(64 * rank, 64 * rank + 64, 16)) for rank in range(4)
    ]


def test_small_replicas_stay_together() -> None:
    whole = [(row, ((0,), (64,))) for row in range(6)]
    parts = plan_writes(Run([(64,)] * 6, ["float32"] * 6, [whole] * 3).structures()).rank_plans()
    assert sorted(len(part.piece) for part in parts) == [0, 0, 6], "1.5 KiB are not worth three files"


def test_nodes_are_balanced_before_ranks() -> None:
    """Rank 0 has bytes of its own, so the replicas go to the other node."""
    run = Run(
        [(64, 4), (64, 4)],
        ["float32"] * 2,
        [[(0, ((0, 0), (64, 4))), (1, ((0, 0), (64, 4)))], *[[(1, ((0, 0), (64, 4)))]] * 3],
    )

    def loads(nodes: list[int] | None) -> list[int]:
        parts = plan_writes(run.structures(), chunk_bytes=64, nodes=nodes).rank_plans()
        return [int(part.byte_count.sum()) for part in parts]

    assert loads([7, 7, 3, 3]) == [1024, 0, 512, 512]
    assert loads([7, 3, 7, 3]) == [1024, 512, 0, 512]
    first, *others = loads(None)
    assert first == 1024
    assert sum(others) == 1024
    assert max(others) - min(others) <= 64


def test_nodes_must_have_an_entry_for_each_rank() -> None:
    run = Run([(4,)], ["float32"], [[(0, ((0,), (4,)))]])
    with pytest.raises(ValueError, match="nodes has 2 entries, expected one for each of 1 ranks"):
        plan_writes(run.structures(), nodes=[0, 1])


def test_gap_names_key_box_and_holders() -> None:
    run = Run([(4, 2)], ["float32"], [[(0, ((0, 0), (2, 2)))], [(0, ((2, 0), (1, 2)))]])
    with pytest.raises(TilingError, match=r"'t0'.*gap.*\[3:4,0:2\].*ranks 0, 1") as caught:
        plan_writes(run.structures())
    assert caught.value.details["kind"] == "gap"
    assert caught.value.details["box"] == [[3, 0], [1, 2]]


def test_overlap_names_both_boxes() -> None:
    run = Run([(4,)], ["float32"], [[(0, ((0,), (3,)))], [(0, ((2,), (2,)))]])
    with pytest.raises(TilingError, match="overlap") as caught:
        plan_writes(run.structures())
    assert caught.value.details["holders"] == {"[0:3]": [0], "[2:4]": [1]}


def test_out_of_bounds_is_named() -> None:
    run = Run([(4,)], ["float32"], [[(0, ((0,), (5,)))]])
    with pytest.raises(TilingError, match="out of bounds"):
        plan_writes(run.structures())


def test_a_tensor_that_no_rank_holds_is_a_gap() -> None:
    with pytest.raises(TilingError, match="no rank holds any of it"):
        plan_writes(Run([(4,)], ["float32"], [[], []]).structures())


@pytest.mark.parametrize(("dtype", "shape"), [("float16", (4,)), ("float32", (5,))])
def test_ranks_that_disagree_are_named(dtype: str, shape: tuple[int, ...]) -> None:
    ours = Run([(4,)], ["float32"], [[(0, ((0,), (4,)))]]).structures()
    theirs = Run([shape], [dtype], [[(0, ((0,), shape))]]).structures()
    with pytest.raises(StructureError, match=r"rank 0 declares float32.*rank 1 declares"):
        plan_writes(ours + theirs)


def test_a_key_is_a_tensor_or_a_value_on_all_ranks() -> None:
    tensor = Run([(4,)], ["float32"], [[(0, ((0,), (4,)))]]).structures()
    value = Structure.build(TensorTable((), (), (), ()), ["t0"], [], [], [])
    with pytest.raises(StructureError, match="a tensor on rank 0 and a plain value on rank 1"):
        plan_writes([*tensor, value])


def _tied(alias: str) -> Structure:
    table = TensorTable(("a", "b"), ("float32",) * 2, ((4,), (4,)), ("", alias))
    return Structure.build(table, [], [0, 1], [0, 0], [4, 4])


def test_an_alias_is_stored_once() -> None:
    plan = plan_writes([_tied("a"), _tied("a")])
    assert plan.is_stored == [True, False]
    assert plan.merged.aliases == {"b": "a"}
    assert int(plan.byte_count.sum()) == 16


def test_an_alias_on_some_ranks_only_is_stored_on_its_own() -> None:
    plan = plan_writes([_tied("a"), _tied("")])
    assert plan.is_stored == [True, True]
    assert int(plan.byte_count.sum()) == 32


def test_plans_are_decoded_as_they_were_encoded() -> None:
    run = Run([(4, 4), ()], ["float32", "int64"], [[(0, ((0, 0), (4, 4))), (1, ((), ()))]])
    structure = run.structures()[0]
    again = Structure.decode(structure.encode())
    assert again.digest() == structure.digest()
    part = plan_writes([structure]).rank_plans()[0]
    copy = type(part).decode(part.encode())
    assert copy.objects == part.objects == ("note",)
    for column in ("piece", "piece_start", "byte_start", "byte_count", "box_offsets", "box_sizes"):
        assert getattr(copy, column).tolist() == getattr(part, column).tolist(), column


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ("x",)},
        {"dtypes": ("float16",)},
        {"shapes": ((2, 4),)},
        {"aliases": ("y",)},
    ],
)
def test_the_digest_covers_every_part_of_a_structure(change: dict[str, tuple]) -> None:
    columns = {"keys": ("w",), "dtypes": ("float32",), "shapes": ((4, 2),), "aliases": ("",)}
    base = Structure.build(TensorTable(**columns), ["o"], [0], [0, 0], [4, 2])
    changed = Structure.build(TensorTable(**(columns | change)), ["o"], [0], [0, 0], [4, 2])
    assert base.digest() != changed.digest()
    other_box = Structure.build(TensorTable(**columns), ["o"], [0], [0, 0], [2, 2])
    other_object = Structure.build(TensorTable(**columns), ["p"], [0], [0, 0], [4, 2])
    assert len({base.digest(), other_box.digest(), other_object.digest()}) == 3
