from __future__ import annotations

import logging

import pytest
import torch

from tests.workers.telemetry.stub_service import Service
from tests.workers.telemetry.test_reporter import scrape
from thinwire.comm import SoloGroup
from thinwire.comm.protocol import Stats
from thinwire.comm.wire.link_classes import Box, Boxes
from thinwire.contract.reports import Sample
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry import ledger as module
from thinwire.workers.telemetry.ledger import (
    WIRE_INTERFACE_VARIABLE,
    Ledger,
    WireAccount,
    WireMeter,
    wire_meter,
)
from thinwire.workers.telemetry.reporter import Reporter

TWO_BOXES = Boxes((Box("aa", "a"), Box("bb", "b"), Box("bb", "b")))
WIRE_METRICS = tuple(
    f"thinwire_wire_{name}" for name in ("counted_bytes_total", "predicted_bytes_total", "unexplained_ratio")
)


class Interface:
    """An interface that has sent what a test says."""

    def __init__(self) -> None:
        self.sent_bytes = 1_000_000

    def read(self, name: str) -> int:
        return self.sent_bytes


def test_counted_and_predicted_begin_together_and_stand_side_by_side() -> None:
    interface, stats = Interface(), Stats()
    stats.count("mean", 4_000_000)
    meter = WireMeter(Ledger(stats, TWO_BOXES), "bb", "eth0", interface.read)
    assert meter.account() == WireAccount(0, 0.0)
    stats.count("mean", 4_000_000)
    interface.sent_bytes += 4_200_000
    account = meter.account()
    assert account is not None
    assert account.counted_bytes == 4_200_000
    assert account.predicted_bytes == pytest.approx(4_200_000, rel=0.01)
    assert account.unexplained == pytest.approx(abs(4_200_000 - account.predicted_bytes) / 4_200_000)
    interface.sent_bytes += 4_200_000
    later = meter.account()
    assert later is not None
    assert later.unexplained == pytest.approx(0.5, abs=0.01), "what another sends is not explained"


def test_nothing_counted_has_no_ratio() -> None:
    assert WireAccount(0, 5.0).unexplained is None


def test_a_counter_that_falls_ends_the_meter_with_one_error(caplog: pytest.LogCaptureFixture) -> None:
    interface = Interface()
    meter = WireMeter(Ledger(Stats(), TWO_BOXES), "aa", "eth0", interface.read)
    interface.sent_bytes = 5
    with caplog.at_level(logging.ERROR):
        assert meter.account() is None
        assert meter.account() is None
    assert [record.getMessage() for record in caplog.records] == [
        "wire_meter_ended interface=eth0 reason='its counter fell from 1000000 to 5; was the interface made again?'"
    ]


def test_an_interface_that_goes_away_ends_the_meter(caplog: pytest.LogCaptureFixture) -> None:
    def read(name: str) -> int:
        if gone:
            raise ValueError(f"no {name}")
        return 0

    gone = False
    meter = WireMeter(Ledger(Stats(), TWO_BOXES), "aa", "eth0", read)
    gone = True
    assert meter.account() is None
    assert "no eth0" in caplog.text


@pytest.mark.parametrize(("rank", "measures"), [(0, True), (1, True), (2, False)])
def test_one_rank_of_each_box_measures_where_it_is_asked_to(
    rank: int, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WIRE_INTERFACE_VARIABLE, raising=False)
    assert wire_meter(Stats(), TWO_BOXES, rank) is None
    monkeypatch.setenv(WIRE_INTERFACE_VARIABLE, "eth7")
    monkeypatch.setattr(module.WireMeter.__init__, "__defaults__", (Interface().read,))
    assert (wire_meter(Stats(), TWO_BOXES, rank) is not None) == measures


def test_a_wrong_interface_is_said_and_fails_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WIRE_INTERFACE_VARIABLE, "no-such0")
    assert wire_meter(Stats(), TWO_BOXES, 0) is None
    assert "no-such0" in caplog.text


def test_a_worker_that_measures_exports_all_three_and_another_none(
    monkeypatch: pytest.MonkeyPatch, service: Service
) -> None:
    interface, stats = Interface(), Stats()
    meter = WireMeter(Ledger(stats, TWO_BOXES), "aa", "eth0", interface.read)
    found = []
    for wire in (meter, None):
        reporter = Reporter.in_place(Place(service.run_dir, 2), 1)
        reporter.serve("j-1", 1, "127.0.0.1")
        monkeypatch.setattr(module, "wire_meter", lambda *asked, wire=wire: wire)
        reporter.seated(SoloGroup(), torch.device("cpu"))
        stats.count("all_to_all", 1_000_000)
        interface.sent_bytes += 500_000
        reporter.steps([Sample(step=1, phase="compressed", world_size=3, time=1.0)], 1, {"optimizer": 1})
        found.append({name: of[()] for name, of in scrape(reporter.metrics, 1).items() if name in WIRE_METRICS})
        reporter.close()
    counted, predicted, ratio = (found[0][name] for name in WIRE_METRICS)
    assert counted == 500_000
    assert predicted > 1_000_000
    assert ratio == pytest.approx((predicted - counted) / counted)
    assert found[1] == {}
