"""Laws of the codecs on random and nasty values."""

import math

import numpy as np
import pytest
import torch

from tests.comm.exchange.test_plain import CODECS
from thinwire.comm.codecs import Int4Codec, Int8Codec, SignCodec, ThresholdCodec, TopKCodec
from thinwire.comm.codecs.threshold import largest
from thinwire.comm.kernels.reference import pack_signs, unpack_signs
from thinwire.comm.layout import VectorLayout

NASTY = [0.0, -0.0, 1e-40, -1e-40, 1e18, -1e18, 1.0, -1.0]


def roundtrip(codec, x, layout):
    row_codec = codec.row(layout, 0, layout.numel, x)
    row = torch.zeros(row_codec.wire_bytes + 16, dtype=torch.uint8)
    finite = bool(row_codec.encode(x, row))
    out = torch.full_like(x, 7.0)
    row_codec.decode(row, out)
    return out, finite, row_codec


def test_signs_are_packed_as_numpy_packs_bits():
    x = torch.tensor(NASTY * 4 + [3.0, -3.0] * 4)
    packed = torch.zeros(x.numel() // 8, dtype=torch.uint8)
    pack_signs(x, packed)
    assert packed.numpy().tolist() == np.packbits((x >= 0).numpy()).tolist()
    out = torch.zeros_like(x)
    unpack_signs(packed, out)
    assert torch.equal(out, torch.where(x >= 0, 1.0, -1.0))


@pytest.mark.parametrize("num_live", [1, 7, 8, 9, 4095, 4096, 4097, 10_000])
def test_sign_codec_keeps_the_norm_of_every_block_and_the_sign_of_every_value(num_live):
    layout = VectorLayout.single(num_live)
    x = torch.zeros(layout.numel, dtype=torch.float64)
    x[:num_live] = torch.randn(num_live, dtype=torch.float64)
    out, finite, row = roundtrip(SignCodec(), x, layout)
    assert finite
    assert torch.equal(out[:num_live] >= 0, x[:num_live] >= 0)
    assert not out[num_live:].any()
    for start, stop in layout.blocks(4096):
        assert out[start:stop].norm() == pytest.approx(float(x[start:stop].norm()), rel=1e-12)
    assert row.wire_bytes == layout.numel // 8 + 8 * len(layout.blocks(4096))


@pytest.mark.parametrize("num_live", [1, 7, 9, 4097, 10_000])
def test_the_l1_scale_keeps_the_1_norm_and_leaves_out_less_than_it_was_given(num_live):
    layout = VectorLayout.single(num_live)
    x = torch.zeros(layout.numel, dtype=torch.float64)
    x[:num_live] = torch.randn(num_live, dtype=torch.float64) ** 5  # heavy tails: the l2 scale leaves out more
    kept = {scale: roundtrip(SignCodec(scale=scale), x, layout)[0] for scale in ("l1", "l2")}
    assert torch.equal(kept["l1"][:num_live] >= 0, x[:num_live] >= 0)
    assert not kept["l1"][num_live:].any()
    for start, stop in layout.blocks(4096):
        a, c = x[start:stop], kept["l1"][start:stop]
        assert c.abs().sum() == pytest.approx(float(a.abs().sum()), rel=1e-12)
        rho = float(a.abs().sum()) / (min(stop, num_live) - start) ** 0.5 / float(a.norm())
        assert (a - c).norm() ** 2 == pytest.approx(float(a.norm() ** 2) * (1 - rho**2), rel=1e-9, abs=1e-20)
    assert (x - kept["l1"]).norm() <= (x - kept["l2"]).norm()
    if num_live > 1000:
        assert (x - kept["l2"]).norm() > x.norm() > (x - kept["l1"]).norm()


def test_a_scale_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="scale = 'l3': must be one of l2, l1"):
        SignCodec(scale="l3")


@pytest.mark.parametrize("name", CODECS)
def test_zeros_decode_to_zeros(name):
    layout = VectorLayout.single(100)
    out, finite, _ = roundtrip(CODECS[name], torch.zeros(layout.numel), layout)
    assert finite
    assert not out.any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_reported(name, bad):
    layout = VectorLayout.single(100)
    x = torch.randn(layout.numel)
    x[100:] = 0
    x[57] = bad
    assert not roundtrip(CODECS[name], x, layout)[1]


@pytest.mark.parametrize("name", CODECS)
def test_an_empty_chunk_encodes_to_nothing(name):
    layout = VectorLayout.single(16)
    row = CODECS[name].row(layout, 16, 16, torch.zeros(1))
    assert row.wire_bytes == 0
    assert bool(row.encode(torch.zeros(0), torch.zeros(8, dtype=torch.uint8)))
    row.decode(torch.zeros(8, dtype=torch.uint8), torch.zeros(0))


@pytest.mark.parametrize("block", [0, 12, -8])
def test_a_block_that_is_no_multiple_of_8_is_refused(block):
    with pytest.raises(ValueError, match="multiple of 8"):
        SignCodec(block=block)


@pytest.mark.parametrize("numel", [8, 4096, 4104, 3 * 4096 + 1000])
def test_the_bytes_of_few_bits_are_those_that_are_told(numel):
    layout, like = VectorLayout.single(numel), torch.zeros(1)
    assert Int4Codec().row(layout, 0, numel, like).wire_bytes == numel // 2 + 4 * -(-numel // 128)
    whole, rest = divmod(numel, 4096)
    kept = min(rest, 4 * math.ceil(math.ceil(rest / 64) / 4))
    assert TopKCodec().row(layout, 0, numel, like).wire_bytes == whole * 120 + (8 + 7 * kept // 4 if rest else 0)
    assert ThresholdCodec(0.01).row(layout, 0, numel, like).wire_bytes == 4 * math.ceil(0.01 * numel)


@pytest.mark.parametrize("numel", [8, 1 << 16, (1 << 16) + 8, 3 * (1 << 16) + 5000])
@pytest.mark.parametrize("share", [1e-9, 0.01, 0.3, 0.5])
def test_what_is_above_the_threshold_is_sent_in_16_bits_and_nothing_else(numel, share):
    """Runs that hold nothing of it, and more than fits a sample, too."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[: numel // 2] *= 1e-4
    out, finite, row = roundtrip(ThresholdCodec(share), x, VectorLayout.single(numel))
    keep = math.ceil(share * numel)
    assert finite
    assert row.wire_bytes == 4 * keep + 4 * max(-(-numel // (1 << 16)) - 1, 0)
    threshold = x.abs().topk(keep).values[-1]
    assert torch.equal(out, torch.where(x.abs() >= threshold, x.bfloat16().double(), 0.0))


@pytest.mark.parametrize(
    "x", [torch.ones(1 << 17), torch.zeros(1 << 17), torch.eye(1 << 9)[3].repeat(1 << 8)], ids=["all", "none", "period"]
)
def test_a_threshold_that_all_or_none_reach_sends_as_much_as_any(x):
    """The sample meets a single value of a period of 512, or none."""
    sizes = ThresholdCodec(0.01).row(VectorLayout.single(x.numel()), 0, x.numel(), x).wire_bytes
    out, finite, _ = roundtrip(ThresholdCodec(0.01), x, VectorLayout.single(x.numel()))
    assert finite
    assert sizes == 4 * math.ceil(0.01 * x.numel()) + 4
    assert out.count_nonzero() == min(math.ceil(0.01 * x.numel()), x.count_nonzero())
    assert torch.equal(out[out != 0], x[out != 0])


@pytest.mark.parametrize("keep", [1, 100, 30_000, 60_000])
def test_the_sample_changes_nothing_but_what_it_costs(keep):
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(2)).abs()
    for sizes in (x, x.sort().values, x.sort(descending=True).values):
        assert set(largest(sizes, keep).tolist()) == set(sizes.topk(keep).indices.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_sends_the_largest_and_never_leaves_out_more_than_it_was_given(dtype):
    x = torch.randn(3 * 64 + 8, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[:60], x[128:192] = 0, torch.arange(64)  # fewer than are kept; a run that begins with zero
    layout = VectorLayout.single(x.numel())
    out, finite, _ = roundtrip(TopKCodec(64, 8), x, layout)
    assert finite
    for at in (slice(0, 64), slice(64, 128), slice(128, 192)):
        sent = out[at].nonzero().view(-1)
        kept = x[at].abs().topk(8).indices
        assert set(sent.tolist()) == set(kept[x[at][kept] != 0].tolist())
        assert (out[at].sign()[sent] == x[at].sign()[sent]).all()
        assert len(set(out[at][sent].abs().tolist())) <= 2
    assert (x - out).norm() < x.norm()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Int4Codec(12), "block = 12: must be a positive multiple of 8"),
        (lambda: Int4Codec(8.0), "block = 8.0: must be a positive multiple of 8"),
        (lambda: Int8Codec("8"), "block = '8': must be a positive multiple of 8"),
        (lambda: SignCodec(8.0), "block = 8.0: must be a positive multiple of 8"),
        (lambda: TopKCodec(64.0), "block = 64.0: must be a multiple of 8"),
        (lambda: TopKCodec(64, "4"), "keep = '4': must be a multiple of 4"),
        (lambda: ThresholdCodec("0.1"), "share = '0.1': must be above 0"),
        (lambda: ThresholdCodec(0.0), "share = 0.0: must be above 0, which would send nothing, and at most 0.5"),
        (lambda: ThresholdCodec(1.0), "share = 1.0: must be above 0"),
        (lambda: ThresholdCodec(float("nan")), "share = nan: must be above 0"),
        (lambda: TopKCodec(8192), "block = 8192: must be a multiple of 8, at most 4096"),
        (lambda: TopKCodec(64, 6), "keep = 6: must be a multiple of 4, at most the 64 values of a run"),
        (lambda: TopKCodec(64, 68), "keep = 68: must be a multiple of 4, at most the 64"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
