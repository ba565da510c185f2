"""What may be asked of a lab, and what is made of it."""

from __future__ import annotations

import pytest

from thinwire.cli.quantities import rate_mbit, time_ms
from thinwire.tools.lab import HostCounters, Lab, LabError, LabSpec, network
from thinwire.tools.lab.counters import token_buckets
from thinwire.tools.lab.network import shaping_of


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hosts": 0}, "hosts = 0"),
        ({"hosts": 2.0}, "hosts = 2.0"),
        ({"hosts": True}, "hosts = True"),
        ({"hosts": 129}, "from 1 to 128"),
        ({"rate_mbit": 0.5}, "rate_mbit = 0.5"),
        ({"rate_mbit": float("nan")}, "rate_mbit = nan"),
        ({"delay_ms": -1}, "delay_ms = -1"),
        ({"loss": 0.6}, "loss = 0.6"),
        ({"ranks_per_host": 0}, "ranks_per_host = 0"),
    ],
)
def test_a_wrong_spec_names_field_and_value(wrong, said):
    with pytest.raises(ValueError, match=said):
        LabSpec(**({"hosts": 2, "rate_mbit": 100.0} | wrong))


def test_the_delay_depends_on_the_rate_where_none_is_given():
    assert LabSpec(2, 1000).delay_ms == 0.1
    assert LabSpec(2, 2700).delay_ms == 0.0
    assert LabSpec(2, 2700, delay_ms=0.2).delay_ms == 0.2
    assert LabSpec(2, 100, delay_ms=0).delay_ms == 0


@pytest.mark.parametrize(
    ("rate", "bucket", "queue", "gso"),
    [
        (100, 16384, 262144, 8192),
        (1000, 62500, 1_000_000, 31250),
        (2700, 262144, 2_700_000, 65536),
        (10000, 625000, 10_000_000, 65536),
    ],
)
def test_a_bucket_holds_two_segments_and_half_a_millisecond(rate, bucket, queue, gso):
    shaping = shaping_of(LabSpec(2, rate))
    assert (shaping.bucket_bytes, shaping.queue_bytes, shaping.gso_bytes) == (bucket, queue, gso)
    assert shaping.rate_bit == rate * 10**6
    assert shaping.gso_bytes * 2 <= shaping.bucket_bytes


def test_ranks_fill_host_after_host():
    spec = LabSpec(3, 100, ranks_per_host=2)
    assert [spec.host_of(rank) for rank in range(spec.world_size)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("text", "value"), [("100mbit", 100), ("2.7gbit", 2700), ("1Gbit/s", 1000), ("1500 kbit", 1.5)]
)
def test_rates_are_read_with_their_unit(text, value):
    assert rate_mbit(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["100", "fast", "", "1e3mbit", "100mb", "-1mbit"])
def test_a_rate_without_a_unit_that_is_known_is_refused(text):
    with pytest.raises(ValueError, match="mbit"):
        rate_mbit(text)


def test_times_are_read_with_their_unit():
    assert (time_ms("0.1ms"), time_ms("100us"), time_ms("0"), time_ms("1s")) == (0.1, pytest.approx(0.1), 0, 1000)
    with pytest.raises(ValueError, match="'5'"):
        time_ms("5")


def test_netem_is_told_loss_in_percent_and_holds_what_is_under_way():
    spec = LabSpec(2, 100, delay_ms=10, loss=0.01)
    said = network._netem(1, spec, shaping_of(spec))
    assert "dev port1 parent 1:" in said
    assert "delay 10ms loss 1%" in said
    frames = int(said.split("limit ")[1].split()[0])
    assert frames * 1500 >= 100e6 / 8 * 10e-3  # bandwidth x delay


def test_counters_subtract_for_the_same_host_only():
    one = HostCounters(0, 5, 500, 1, 4, 400, 0)
    assert HostCounters(0, 7, 800, 1, 4, 450, 2) - one == HostCounters(0, 2, 300, 0, 0, 50, 2)
    with pytest.raises(ValueError, match="host 1 and host 0"):
        _ = HostCounters(1, 7, 800, 1, 4, 450, 2) - one


def test_an_interface_that_lost_its_token_bucket_is_said():
    with pytest.raises(LabError, match="no token bucket"):
        token_buckets('[{"kind": "noqueue", "dev": "lo", "root": true}]')


def test_a_lab_is_of_use_in_its_block_only():
    lab = Lab(LabSpec(2, 100))
    with pytest.raises(LabError, match="not up"):
        lab.run(["true"])


def test_a_missing_tool_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(network, "TOOL_FOLDERS", ())
    with pytest.raises(LabError, match="apt install iproute2"):
        network.tool("tc")
