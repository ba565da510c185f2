"""Seconds of a step from work and wire: against cases computed by hand, and what must hold for any."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.wire.network import Cost, Network
from thinwire.comm.wire.step_time import (
    DDP_BUCKET_BYTES,
    NOTHING,
    Sent,
    Transport,
    Work,
    dense_16,
    dense_32,
    one_bit,
    step_seconds,
    wire_seconds,
)

FREE = Transport()
BUCKET = 1 << 22


def test_what_is_sent_by_hand():
    """Two ranks, 4096 * 1000 values: a ring sends the vector once, one bit an eighth of a byte and a scale a block."""
    network, numel = Network(2, 0.001, 1e6), 4_096_000
    assert dense_32(network, numel, FREE).payload_bytes == 4 * numel
    assert dense_16(network, numel, FREE).payload_bytes == 2 * numel
    assert one_bit(network, numel, FREE, BUCKET).payload_bytes == numel / 8 + 4 * 1000
    assert wire_seconds(network, one_bit(network, numel, FREE, BUCKET)) == pytest.approx(0.002 + 0.516)


def test_every_bucket_pays_its_rounds():
    numel = 10 * DDP_BUCKET_BYTES // 4
    assert dense_32(Network(4, 1.0, 1e9), numel, FREE).cost.rounds == 10 * 2 * 3
    assert dense_32(Network(4, 1.0, 1e9), numel, FREE, numel).cost.rounds == 2 * 3


def test_the_transport_is_paid_by_the_byte():
    network = Network(2, 0.0, math.inf)
    assert wire_seconds(network, dense_32(network, 1000, Transport(all_reduce_32=0.5))) == 2000
    assert wire_seconds(network, dense_16(network, 1000, Transport(all_reduce_16=0.5))) == 1000
    assert wire_seconds(network, one_bit(network, 4096, Transport(bits=0.5), BUCKET)) == 258


def test_a_ring_takes_what_wire_or_transport_take_whichever_is_longer_and_one_bit_takes_both():
    """4 000 bytes a second or half of them: the ring's 4 000 bytes and 0.5 s of processor for each of 1 000 pieces."""
    for bytes_per_s, seconds in ((4e3, 2.0), (1e3, 4.0)):
        network = Network(2, 0.0, bytes_per_s)
        assert wire_seconds(network, dense_32(network, 1000, Transport(all_reduce_32=5e-4))) == seconds
    network = Network(2, 0.0, 516.0)
    assert wire_seconds(network, one_bit(network, 4096, Transport(bits=2 / 516), BUCKET)) == pytest.approx(3.0)


def test_one_rank_sends_nothing():
    alone = Network(1, 0.0, math.inf)
    for sent in (dense_32(alone, 1000, FREE), dense_16(alone, 1000, FREE), one_bit(alone, 1000, FREE, BUCKET)):
        assert sent == NOTHING
    assert step_seconds(alone, Work(0.25, 0.1), NOTHING, 1.0) == 0.25


@pytest.mark.parametrize(
    ("cores", "seconds"),
    [(0.5, 6.25), (1.0, 6.25), (1.5, 5.875), (2.0, 5.5), (16.0, 5.5), (math.inf, 5.5)],
)
def test_backward_hides_the_wire_where_there_is_a_core_for_it_and_half_of_it_where_not(cores, seconds):
    """Busy 5 s, of which backward is 3; the wire takes 2, in 4 buckets: three quarters of it can pass in backward."""
    sent = Sent(Cost(0, 2.0), 2.0, 0.0, buckets=4)
    assert step_seconds(Network(2, 0.0, 1.0), Work(5.0, 3.0), sent, cores) == seconds


def test_no_more_is_hidden_than_backward_is_long():
    sent = Sent(Cost(0, 20.0), 20.0, 0.0, buckets=10**9)
    assert step_seconds(Network(2, 0.0, 1.0), Work(5.0, 3.0), sent, 2.0) == pytest.approx(22.0)


def test_work_whose_backward_is_longer_than_all_of_it_is_refused():
    with pytest.raises(ValueError, match="need 0 <= backward_s <= busy_s"):
        Work(1.0, 2.0)


seconds = st.floats(1e-4, 10.0)
rates = st.floats(1e5, 1e11)
networks = st.builds(Network, st.integers(2, 64), st.floats(0, 1e-2), rates)
cores = st.floats(0.25, 8.0)


@given(networks, rates, seconds, st.integers(10**5, 10**9), cores)
def test_a_slower_link_never_makes_a_step_shorter(network, other, busy_s, numel, cores):
    work, slower = Work(busy_s, busy_s / 2), Network(network.ranks, network.latency_s, min(other, network.bytes_per_s))
    for send in (dense_32, dense_16):
        fast, slow = (step_seconds(net, work, send(net, numel, FREE), cores) for net in (network, slower))
        assert slow >= fast * (1 - 1e-12)


@given(networks, rates, seconds, seconds, st.integers(10**5, 10**9))
def test_a_slower_link_never_makes_compression_pay_less(network, other, busy_s, kernels_s, numel):
    """Without overlap, for any time that the kernels of compression take."""
    slower = Network(network.ranks, network.latency_s, min(other, network.bytes_per_s))

    def gain(net):
        full = step_seconds(net, Work(busy_s), dense_32(net, numel, FREE, BUCKET), 1.0)
        return full / step_seconds(net, Work(busy_s + kernels_s), one_bit(net, numel, FREE, BUCKET), 1.0)

    assert gain(slower) >= gain(network) * (1 - 1e-9)


@given(networks, seconds, st.integers(10**5, 10**9), cores, cores)
def test_more_cores_never_make_a_step_longer(network, busy_s, numel, some, others):
    sent = dense_32(network, numel, FREE)
    few, many = (step_seconds(network, Work(busy_s, busy_s / 2), sent, one) for one in sorted((some, others)))
    assert many <= few * (1 + 1e-12)
