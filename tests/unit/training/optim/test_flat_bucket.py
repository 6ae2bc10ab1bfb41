"""The geometry of flat buckets, as properties over many sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardproof.training.optim.distributed.flat_bucket import pack

sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12)
ranks = st.integers(1, 7)
aligns = st.sampled_from([1, 4, 8])
limits = st.integers(1, 200)


@given(sizes, limits, ranks, aligns)
def test_every_parameter_lies_in_one_bucket_in_order(
    sizes: list[int], limit: int, ranks: int, align: int
) -> None:
    buckets = pack(list(enumerate(sizes)), limit=limit, ranks=ranks, align=align)
    spans = [span for bucket in buckets for span in bucket.spans]
    assert [span.parameter for span in spans] == list(range(len(sizes)))
    assert [span.size for span in spans] == sizes
    for bucket in buckets:
        assert len(bucket.spans) == 1 or bucket.spans[-1].stop <= limit


@given(sizes, limits, ranks, aligns)
def test_spans_and_gaps_tile_a_bucket(sizes: list[int], limit: int, ranks: int, align: int) -> None:
    for bucket in pack(list(enumerate(sizes)), limit=limit, ranks=ranks, align=align):
        covered = [0] * bucket.size
        for start, stop in [(span.offset, span.stop) for span in bucket.spans] + list(bucket.gaps()):
            for at in range(start, stop):
                covered[at] += 1
        assert covered == [1] * bucket.size
        assert all(span.offset % align == 0 for span in bucket.spans)
        end = bucket.spans[-1].stop
        assert 0 <= bucket.size - end < ranks * align, "padding behind is less than one granule"
        inner = [stop - start for start, stop in bucket.gaps() if stop <= end]
        assert all(gap < align for gap in inner)


@given(sizes, limits, ranks, aligns)
def test_ranges_tile_buckets_and_parts_tile_parameters(
    sizes: list[int], limit: int, ranks: int, align: int
) -> None:
    for bucket in pack(list(enumerate(sizes)), limit=limit, ranks=ranks, align=align):
        assert bucket.shard * ranks == bucket.size
        assert bucket.shard % align == 0
        for span in bucket.spans:
            owned = []
            for rank in range(ranks):
                start, stop = bucket.part(span, rank)
                assert (start, stop) == (0, 0) or 0 <= start < stop <= span.size
                assert start == stop or rank * bucket.shard <= span.offset + start
                assert span.offset + stop <= (rank + 1) * bucket.shard or start == stop
                owned += range(start, stop)
            assert owned == list(range(span.size))


def test_a_large_parameter_has_a_bucket_to_itself() -> None:
    buckets = pack([(2, 4), (1, 1000), (0, 4)], limit=10, ranks=2, align=1)
    assert [[span.parameter for span in bucket.spans] for bucket in buckets] == [[2], [1], [0]]


def test_parameters_fill_a_bucket_up_to_its_limit() -> None:
    buckets = pack([(0, 4), (1, 4), (2, 1)], limit=8, ranks=2, align=1)
    assert [[span.parameter for span in bucket.spans] for bucket in buckets] == [[0, 1], [2]]
