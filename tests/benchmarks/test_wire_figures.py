"""What follows from raw times, on numbers that can be reckoned by hand."""

import pytest
from rich.console import Console

from benchmarks.wire import pictures, table
from benchmarks.wire.cases import GOODPUT
from benchmarks.wire.figures import Point, crossings, curves, modelled, pays, rows
from benchmarks.wire.limits import floor_bytes
from benchmarks.wire.machine import stolen_and_all_s
from benchmarks.wire.methods import METHODS
from benchmarks.wire.results import Sitting

from .wire_made_up import PARAMETERS, a_case, made_up, measured


def only_row(result, method):
    return {row.method: row for row in rows(result)}[method]


def test_a_step_ends_with_its_slowest_rank_and_a_turn_of_many_steps_counts_their_mean():
    result = made_up(a_case(), {"ddp_fp32": 0.2, "zero_one_adam_4": measured(0.05, steps=4)})
    assert only_row(result, "ddp_fp32").step_s == pytest.approx(0.2)
    assert only_row(result, "zero_one_adam_4").step_s == pytest.approx(0.05)
    assert only_row(result, "zero_one_adam_4").ratio == pytest.approx(4.0)


def test_the_ratio_is_to_the_baseline_of_the_same_sitting():
    first = made_up(a_case(), {"ddp_fp32": 0.2})
    second = made_up(a_case(), {"ddp_fp32": 0.4, "onebit_adam": 0.1})
    both = first.model_copy(update={"sittings": [*first.sittings, *second.sittings]})
    assert only_row(both, "onebit_adam").ratio == pytest.approx(4.0)
    assert only_row(both, "ddp_fp32").step_s == pytest.approx(0.2)
    assert len(rows(both)) == 2


def test_bytes_are_a_step_of_the_host_that_sent_most():
    row = only_row(made_up(a_case(), {"ddp_fp32": 0.2, "zero_one_adam_4": measured(0.1, steps=4)}), "zero_one_adam_4")
    assert row.payload_bytes == 1000
    assert row.frame_bytes == pytest.approx(1000 + 20 / 4)


def test_the_limit_is_the_larger_of_wire_and_processors():
    sent = 12_500_000  # 0.1 s at 1 Gbit
    result = made_up(a_case(), {"ddp_fp32": 0.2, "onebit_adam": measured(0.3, sent=sent)}, compute_s=0.02)
    row = only_row(result, "onebit_adam")
    assert row.wire_limit_s == pytest.approx(0.1 / GOODPUT)
    floor = 12.25 + 12.125 + (8 + 3 / 8) / 2
    assert floor_bytes("onebit_adam", 2) == pytest.approx(floor)
    assert row.cpu_limit_s == pytest.approx(2 * PARAMETERS * floor / 10e9 + 0.02)
    assert row.limit_s == row.wire_limit_s
    assert row.share == pytest.approx(0.1 / GOODPUT / 0.3)


def test_an_exchange_alone_has_no_computation_in_its_limit():
    result = made_up(a_case("exchange-25m"), {"ddp_fp32": 0.2, "onebit_adam": 0.1}, compute_s=5.0)
    assert only_row(result, "onebit_adam").cpu_limit_s < 0.1


def test_all_but_powersgd_have_a_floor_and_that_of_zero_one_adam_is_the_mean_of_a_round():
    assert {name for name in METHODS if floor_bytes(name, 2) is None} == {"powersgd_1", "powersgd_2", "powersgd_4"}
    sync = 20.125 + (8 + 2 / 8 + 1 / 8) / 2 + 16.125
    assert floor_bytes("zero_one_adam_1", 2) == pytest.approx(sync)
    assert floor_bytes("zero_one_adam_4", 2) == pytest.approx((3 * 32 + sync) / 4)


def test_of_ddp_what_its_backward_takes_longer_than_alone_is_wire():
    result = made_up(a_case(), {"ddp_fp32": measured(0.2, backward=0.107, forward=0.003, update=0.09)})
    row = only_row(result, "ddp_fp32")
    assert row.phases["backward"] == pytest.approx(0.007)
    assert row.phases["wire"] == pytest.approx(0.1)


def test_lines_cross_where_their_ratio_passes_one_straight_in_logarithms():
    slow = [Point(100, 1.0), Point(10_000, 1.0)]
    fast = [Point(100, 0.5), Point(10_000, 2.0)]
    (at,) = crossings(fast, slow)
    assert at.rate_mbit == pytest.approx(1000)
    assert not at.modelled
    (third,) = crossings([Point(100, 0.25), Point(1000, 2.0)], [Point(100, 1.0), Point(1000, 1.0)])
    assert third.rate_mbit == pytest.approx(10 ** (2 + 2 / 3))


def test_in_words():
    base = [Point(100, 1.0), Point(1000, 1.0), Point(10_000, 1.0, modelled=True)]

    def other(*seconds):
        return [Point(point.rate_mbit, s, point.modelled) for point, s in zip(base, seconds, strict=True)]

    assert pays(other(0.1, 0.2, 0.9), base) == "faster at 100Mbit to 10Gbit (the last from the model)"
    assert pays(other(2, 2, 2), base).startswith("slower at 100Mbit")
    assert pays(other(0.5, 2, 2), base) == "faster up to about 320Mbit"
    assert pays(other(0.5, 0.5, 2), base) == "faster up to about 3.2Gbit (model)"
    assert pays(other(2, 0.5, 0.5), base) == "faster from about 320Mbit on"
    assert pays(other(0.5, 2, 0.5), base).startswith(
        "faster at first, and they cross at about 320Mbit, 3.2Gbit (model)"
    )
    assert pays([], base) == "not measured"


def test_the_model_shortens_waiting_only():
    result = made_up(a_case(rate=1000), {"ddp_fp32": 0.2, "onebit_adam": measured(0.1, wire=0.06)})
    point = modelled(result, only_row(result, "onebit_adam"), 10_000)
    assert point == Point(10_000, pytest.approx(0.04 + 0.006), modelled=True)


def a_set():
    methods = tuple(METHODS)
    return [
        made_up(
            a_case(rate=rate, methods=methods),
            {name: (0.2 if name.startswith("ddp") else 0.05) * at for name in methods if name != "powersgd_4"},
            failed={"powersgd_4": "rank 0: it\nfell"},
        )
        for rate, at in ((100, 10.0), (1000, 1.0))
    ]


def test_curves_go_from_slow_to_fast_and_end_with_the_model():
    points = curves(reversed(a_set()), "gpt-10m", 2)["ddp_fp32"]
    assert [(point.rate_mbit, point.modelled) for point in points] == [(100, False), (1000, False), (10_000, True)]


def test_every_method_is_in_both_tables_the_failed_one_too(tmp_path):
    results = a_set()
    written = table.write_readme(tmp_path, results, pictures.draw(tmp_path, results)).read_text()
    for width in (120, 300):
        console = Console(width=width, record=True, file=(tmp_path / "shown").open("w"))
        table.show(console, results)
        shown = console.export_text()
        assert "FAILED" in shown
        assert shown.count("DDP + fp16 hook") >= 2
    for method in METHODS.values():
        assert written.count(f"| {method.title} |") >= (2 if method.name != "powersgd_4" else 0)
    assert written.count("DDP + PowerSGD rank 4 **failed**: rank 0: it fell") == 2
    assert "10Gbit is not measured" in written
    assert "(gpt-10m-2.png)" in written
    assert (tmp_path / "gpt-10m-2.png").stat().st_size > 10_000


def test_ranks_that_differ_are_told():
    other = measured(0.1).model_copy(update={"replicas_equal": False})
    assert "REPLICAS DIFFER" in table.cells(only_row(made_up(a_case(), {"ddp_fp32": 0.2, "adam": other}), "adam"))[0]


def test_a_sitting_without_times_has_no_rows():
    result = made_up(a_case(), {"ddp_fp32": 0.2})
    empty = result.model_copy(update={"sittings": [Sitting(measured={}, failed={"adam": "why"})]})
    assert rows(empty) == []


def test_time_that_other_machines_took_is_told_where_it_was_counted():
    result = made_up(a_case(), {"ddp_fp32": 0.2})
    assert "other machines" not in table.heading(result)
    assert "; 4.2% of their time went to other machines)" in table.heading(
        result.model_copy(update={"stolen_share": 0.042})
    )
    stolen_s, all_s = stolen_and_all_s()
    assert 0 <= stolen_s < all_s
