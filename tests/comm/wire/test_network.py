from __future__ import annotations

import pytest

from thinwire.comm.wire.network import (
    LEAST_BUCKET,
    Exchange,
    FullSteps,
    Network,
    Work,
    broadcast,
    bucket_elements,
    exchange_cost,
    one_bit_bytes,
    pipelined,
    predict,
)

BERT_LARGE = 340_000_000
"""Elements whose 16-bit gradients are 680 MB."""

TABLE_1 = [(64, 2205.86), (32, 2173.35), (16, 2133.24), (8, 1897.21)]
"""GPUs in boxes of 4 on 40 Gbit Ethernet, and milliseconds of the all-reduce. Batch of 1 a GPU on 64, 16 else.

Source: Tang et al. 2021, table 1, BERT-Large.
"""


@pytest.mark.parametrize(("gpus", "measured_ms"), TABLE_1)
def test_one_bandwidth_gives_every_ethernet_row_of_the_1_bit_adam_paper(gpus: int, measured_ms: float) -> None:
    network = Network(gpus, 0.0, 4.88e9 / 8, ranks_per_box=4)
    seconds = predict(Exchange.DENSE_16, network, BERT_LARGE).seconds
    assert seconds * 1000 == pytest.approx(measured_ms, rel=0.05)


def test_the_rows_of_that_table_are_not_met_by_any_bandwidth() -> None:
    """That is, the test above can fail: 10 % more or less is too much for at least one row."""
    for factor in (0.9, 1.1):
        network = [Network(gpus, 0.0, factor * 4.88e9 / 8, ranks_per_box=4) for gpus, _ in TABLE_1]
        found = [1000 * predict(Exchange.DENSE_16, one, BERT_LARGE).seconds for one in network]
        assert any(abs(ms / measured - 1) > 0.05 for ms, (_, measured) in zip(found, TABLE_1, strict=True))


@pytest.mark.parametrize(
    ("exchange", "num_bytes"),
    [
        (Exchange.DENSE_FP32, 2 * 31 / 32 * 4e6),
        (Exchange.DENSE_16, 2 * 31 / 32 * 2e6),
        (Exchange.FLAT_ONE_BIT, (8 * 24 / 32 + 31 / 32) * one_bit_bytes(10**6)),
        (Exchange.NODE_FIRST_ONE_BIT, 2 * 3 / 4 * one_bit_bytes(10**6)),
    ],
)
def test_bytes_over_the_link_of_a_box_of_four_with_eight_each(exchange: Exchange, num_bytes: float) -> None:
    network = Network(32, 1e-4, 1e9, ranks_per_box=8)
    assert exchange_cost(exchange, network, 10**6).num_bytes == pytest.approx(num_bytes)


@pytest.mark.parametrize("exchange", Exchange)
def test_nothing_crosses_between_boxes_where_there_is_one(exchange: Exchange) -> None:
    assert predict(exchange, Network(4, 1.0, 1.0, ranks_per_box=4), 1000).wire_s == 0
    assert predict(exchange, Network(1, 0.0, float("inf")), 1000).wire_s == 0


def test_one_bit_is_a_thirty_second_of_fp32_and_its_scales() -> None:
    network = Network(2, 0.0, 1e8)
    dense, signs = (predict(e, network, 1 << 22).wire_s for e in (Exchange.DENSE_FP32, Exchange.FLAT_ONE_BIT))
    assert dense / signs == pytest.approx(32 / (1 + 1 / 128))


def test_latency_is_paid_for_each_round_of_each_bucket() -> None:
    network = Network(4, 1e-3, 1e9)
    one, ten = (predict(Exchange.FLAT_ONE_BIT, network, 10**6, buckets=k).wire_s for k in (1, 10))
    assert ten - one == pytest.approx(9 * (1 + 3) * 1e-3)
    assert broadcast(5, 100.0).rounds == 3


def test_a_pipeline_takes_between_the_longer_part_and_the_sum() -> None:
    assert pipelined(2.0, 1.0, 1) == 3.0
    assert pipelined(2.0, 1.0, 10) == pytest.approx(2.1)
    assert pipelined(1.0, 2.0, 10) == pytest.approx(2.1)


def test_the_inside_of_a_box_costs_where_its_speed_is_known() -> None:
    known = Network(8, 0.0, 1e9, 4, inside_bytes_per_s=1e10)
    assert predict(Exchange.NODE_FIRST_ONE_BIT, known, 10**6).inside_s == pytest.approx(2 * 3 / 4 * 4e6 / 1e10)
    assert predict(Exchange.NODE_FIRST_ONE_BIT, Network(8, 0.0, 1e9, 4), 10**6).inside_s == 0


@pytest.mark.parametrize("numel", [1, 7, 65_535, 10_000_019, 25_000_000])
@pytest.mark.parametrize("latency_s", [0.0, 1e-4, 1e-1])
def test_buckets_cover_the_vector_in_whole_bytes_of_signs(numel: int, latency_s: float) -> None:
    elements = bucket_elements(Network(2, latency_s, 1.2e8), Work(3e8), numel)
    assert elements % 8 == 0
    assert elements >= min(numel, LEAST_BUCKET)


def test_no_other_number_of_buckets_is_faster_and_more_latency_makes_fewer() -> None:
    numel, cpu = 25_000_000, Work(3e8)
    found = []
    for latency_s in (0.0, 1e-4, 1e-3, 1e-2, 1.0):
        network = Network(2, latency_s, 1.2e8)
        buckets = -(-numel // bucket_elements(network, cpu, numel))
        chosen = predict(Exchange.FLAT_ONE_BIT, network, numel, cpu, buckets).seconds
        assert all(
            chosen <= predict(Exchange.FLAT_ONE_BIT, network, numel, cpu, k).seconds + 1e-12 for k in range(1, 65)
        )
        found.append(buckets)
    assert found == sorted(found, reverse=True)
    assert found[0] > 8
    assert found[-1] == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [((3, 0.0, 1.0, 2), "full"), ((2, -1.0, 1.0), "latency"), ((2, 0.0, 0.0), "bytes_per_s"), ((0, 0.0, 1.0), "full")],
)
def test_a_network_that_cannot_be_is_refused(arguments: tuple[float, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Network(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="numel = 0"):
        bucket_elements(Network(2, 0.0, 1.0), Work(1.0), 0)


def test_what_a_bucket_costs_makes_fewer_and_a_slow_wire_more() -> None:
    def buckets(bytes_per_s: float, bucket_s: float) -> int:
        numel = 25_000_000
        return -(-numel // bucket_elements(Network(2, 3e-4, bytes_per_s), Work(4e8, bucket_s), numel))

    assert buckets(1.2e8, 3e-3) < buckets(1.2e8, 1e-4)
    assert buckets(1.2e8, 3e-3) < buckets(1.2e7, 3e-3)
    assert buckets(1e12, 3e-3) == 1


@pytest.mark.parametrize("rate", [1.25e7, 1.25e8, 1.25e9])
def test_the_more_steps_are_in_full_the_more_buckets_there_are_up_to_what_suits_these(rate):
    network, numel = Network(2, 2e-4, rate), 25_490_000

    def buckets(part):
        full = FullSteps(Exchange.FLAT_8, part)
        return -(-numel // bucket_elements(network, Work(4e8, 3e-3), numel, full))

    found = [buckets(part) for part in (0.0, 0.1, 0.3, 0.6, 1.0)]
    assert found == sorted(found)
    assert found[0] == -(-numel // bucket_elements(network, Work(4e8, 3e-3), numel))
    seconds = {k: predict(Exchange.FLAT_8, network, numel, Work(4e8, 3e-3), k).seconds for k in range(1, 65)}
    assert seconds[found[-1]] == min(seconds.values())
