"""A vector cut into buckets: covered once, from its end, in whole bytes, at the cuts."""

import pytest

from tests.comm.exchange.test_plain import LAYOUT
from thinwire.comm.layout import DEFAULT_BUCKET, Bucket, Buckets, VectorLayout


@pytest.mark.parametrize("num_live", [1, 8, 9, 1000, 4097])
@pytest.mark.parametrize("target", [1, 8, 13, 100, 4096, DEFAULT_BUCKET])
def test_buckets_cover_the_vector_from_its_end_in_equal_whole_bytes(num_live, target):
    layout = VectorLayout.single(num_live)
    buckets = Buckets.cut(layout, target)
    covered = [i for bucket in reversed(list(buckets)) for i in range(bucket.start, bucket.stop)]
    assert covered == list(range(layout.numel))
    sizes = [bucket.stop - bucket.start for bucket in buckets]
    assert all(size % 8 == 0 for size in sizes)
    assert max(sizes) <= -(-target // 8) * 8
    assert len(set(sizes[:-1])) <= 1  # only the last, at the start of the vector, is short
    assert sizes[-1] <= sizes[0]
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))


def test_no_bucket_reaches_across_a_cut_and_each_knows_its_tensors():
    buckets = Buckets.cut(LAYOUT, 600, cuts=[0, 1024, 1024, LAYOUT.numel])
    assert list(buckets) == [
        Bucket(0, 1024, 1072, range(2, 5)),
        Bucket(1, 512, 1024, range(1, 2)),
        Bucket(2, 0, 512, range(2)),
    ]
    assert [buckets[1].chunk(rank, 3) for rank in range(3)] == [(512, 688), (688, 864), (864, 1024)]


def test_a_bucket_of_padding_only_has_no_tensor():
    layout = VectorLayout(24, ((0, 3), (16, 24)), ((0, 24),))
    assert [bucket.runs for bucket in Buckets.cut(layout, 8)] == [range(1, 2), range(0), range(1)]


@pytest.mark.parametrize("cut", [4, -8, LAYOUT.numel + 8])
def test_cuts_inside_a_byte_or_outside_of_the_vector_are_refused(cut):
    with pytest.raises(ValueError, match=f"cuts .*{cut}"):
        Buckets.cut(LAYOUT, 64, cuts=[cut])


def test_a_bucket_without_elements_is_refused():
    with pytest.raises(ValueError, match="target = 0"):
        Buckets.cut(LAYOUT, 0)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        ((0, 8),),
        ((8, 1072),),
        ((0, 512), (512, 1072)),
        ((512, 1072), (0, 504)),
        ((508, 1072), (0, 508)),
        ((0, 1072), (0, 0)),
    ],
)
def test_spans_that_do_not_follow_one_another_from_the_end_are_refused(spans):
    with pytest.raises(ValueError, match="buckets"):
        Buckets(LAYOUT, spans)


def test_cuts_have_fingerprints():
    first, same, other = Buckets.cut(LAYOUT, 64), Buckets.cut(LAYOUT, 60), Buckets.cut(LAYOUT, 72)
    assert first.fingerprint() == same.fingerprint() != other.fingerprint()
