"""The lines: from made-up times back to the numbers that made them; how far they miss what they were not fitted to."""

import pytest

from tests.tools.collectives.made_up import PIECE, world
from thinwire.comm.wire.network import Cost, Network, relay
from thinwire.contract.collectives import CHAIN, RING, TITLES
from thinwire.tools.collectives.asked import SIZES
from thinwire.tools.collectives.measure import fitted


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-4, 12e6), (2e-3, 1.2e8)])
def test_each_line_comes_back_from_noisy_times(ranks, latency_s, bytes_per_s):
    found = world(ranks, dict.fromkeys(TITLES, (latency_s, bytes_per_s)), noise=0.05).algorithms
    for name, line in found.items():
        assert line.latency_s == pytest.approx(latency_s, rel=0.1), name
        assert line.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1), name
        assert line.worst is not None
        assert abs(line.worst.error) < 0.1, name


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_alpha_and_beta_are_the_line_of_each(ranks):
    for name, line in world(ranks, dict.fromkeys(TITLES, (1e-3, 1e7))).algorithms.items():
        for one in line.timings:
            if name != CHAIN or one.vector_bytes >= PIECE:  # a smaller vector is one piece
                assert line.alpha_s + line.beta_s * one.vector_bytes == pytest.approx(one.median_s, rel=1e-6), name


def test_alpha_and_beta_by_hand():
    """Four ranks, 1 ms a round, 10 MB/s."""
    lines = world(4, dict.fromkeys(TITLES, (1e-3, 1e7))).algorithms
    alphas = {name: round(1e3 * line.alpha_s, 6) for name, line in lines.items()}
    piece_ms = 1e3 * (1e-3 + PIECE / 1e7)
    assert alphas == {"ring": 6, "rows": 4, "tree": 4, "broadcast": 2, "chain": pytest.approx(2 * piece_ms)}
    betas = {name: line.beta_s * 1e7 for name, line in lines.items()}
    assert betas == pytest.approx({"ring": 1.5, "rows": 1.5, "tree": 4, "broadcast": 2, "chain": 1 + 1e4 / PIECE})


def test_a_chain_costs_what_its_formula_says():
    """T = (M/C + n - 2)(alpha + C/B)."""
    network = Network(5, 2e-3, 1e7)
    assert network.seconds(relay(5, 4e6, 1e6)) == pytest.approx((4 + 3) * (2e-3 + 1e6 / 1e7))
    assert relay(2, 10, 1e6) == Cost(1, 10)
    assert relay(3, 0, 1e6) == Cost(2, 0)


def test_every_other_size_is_left_to_check_the_line_and_a_bend_shows_there():
    seconds = {size: (1e-3 if size < 100_000 else 1.0,) for size in SIZES}
    line = fitted(RING, 2, 1, PIECE, seconds)
    assert [one.fitted for one in line.timings] == [True, False, True, False, True, False, True, True]
    assert abs(line.worst.error) > 0.3
    assert fitted(RING, 2, 1, PIECE, dict.fromkeys(SIZES[:3], (0.001,))).worst is None


def test_a_line_that_falls_has_no_negative_number():
    line = fitted(RING, 3, 1, PIECE, {1024: (2.0,), 1 << 20: (1.0,)})
    assert line.latency_s >= 0
    assert line.bytes_per_s > 0
    assert line.beta_s > 0
