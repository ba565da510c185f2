"""What the collectives of a group put on the wire: by the ledger, and by the counters of an interface."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from tests.workers.telemetry.stub_service import Service
from tests.workers.telemetry.test_reporter import scrape
from thinwire.comm import SoloGroup
from thinwire.comm.groups.threads import ThreadGroup, run_threads
from thinwire.comm.protocol import Stats
from thinwire.comm.wire.link_classes import Box, Boxes, LinkClass, exchange_boxes, this_box
from thinwire.contract.metric_names import LINKS
from thinwire.contract.reports import Sample
from thinwire.tools.lab import Lab, LabError, LabSpec
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry import ledger as module
from thinwire.workers.telemetry.ledger import (
    KINDS,
    WIRE_INTERFACE_VARIABLE,
    Calls,
    Frames,
    HeaderModel,
    Ledger,
    LinkBytes,
    Send,
    WireAccount,
    WireMeter,
    entries,
    leaving,
    read_interface,
    read_interfaces,
    sends,
    unexplained_ratio,
    wire_meter,
)
from thinwire.workers.telemetry.reporter import Reporter

SIZES = [1, 2, 3, 4, 8]


def predicted(calls: Calls, boxes: Boxes, box_id: str) -> float:
    """Bytes of frames that leave a box in these collectives."""
    return sum(leaving(call, boxes, box_id, HeaderModel()).num_bytes * times for call, times in calls.items())


def boxes_of(size: int, per_box: int = 1) -> Boxes:
    return Boxes(tuple(Box(f"{rank // per_box:016x}", f"host{rank // per_box}") for rank in range(size)))


@contextmanager
def lab_or_skip(spec: LabSpec) -> Iterator[Lab]:
    """Skips where this machine cannot have a lab; in CI, root must be able to."""
    lab = Lab(spec)
    try:
        lab.__enter__()
    except LabError as error:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            raise
        pytest.skip(f"no lab on this machine: {error}")
    with closing(lab):
        yield lab


def some_of_each(group: ThreadGroup) -> None:
    rows = torch.zeros((group.size, 1001), dtype=torch.uint8)
    x = torch.ones(1003)
    for _ in range(3):
        group.all_to_all(torch.empty_like(rows), rows)
    group.all_gather(torch.empty_like(rows), rows[0])
    group.mean_(x)
    group.start_sum_(x).wait()
    group.broadcast_(x, src=group.size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_the_ledger_of_each_rank_sums_to_what_the_group_counted(size: int) -> None:
    def work(group: ThreadGroup) -> tuple[Stats, dict[str, int], dict[str, int]]:
        ledger = Ledger(group.stats, boxes_of(size))
        some_of_each(group)
        own, all_ranks = Counter[str](), Counter[str]()
        for entry in ledger.entries([group.rank]):
            own[entry.kind] += entry.num_bytes
        for entry in ledger.entries():
            all_ranks[entry.kind] += entry.num_bytes
        return group.stats, own, all_ranks

    found = run_threads(size, work)
    for kind in KINDS:
        counted = sum(stats.bytes_by_kind[kind] for stats, _, _ in found)
        assert [all_ranks[kind] for _, _, all_ranks in found] == [counted] * size, kind
        assert sum(own[kind] for _, own, _ in found) == counted
        if kind != "broadcast":  # which is booked on its source, while relays send it too
            assert all(own[kind] == stats.bytes_by_kind[kind] for stats, own, _ in found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("root", [0, 1])
def test_a_broadcast_reaches_every_rank_once_from_one_that_has_it(size: int, root: int) -> None:
    root %= size
    have = {root}
    for send in sends(("broadcast", 10, root), size):
        assert send.src in have
        assert send.dst not in have
        have.add(send.dst)
    assert have == set(range(size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_never_sends_to_itself_and_a_group_of_one_sends_nothing(kind: str) -> None:
    assert list(sends((kind, 100, 0), 1)) == []
    assert all(send.src != send.dst for send in sends((kind, 700, 0), 8))


def test_an_unknown_collective_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'reduce'"):
        list(sends(("reduce", 8, -1), 2))


def test_messages_of_an_all_reduce_are_those_that_gloo_sent() -> None:
    """By the bytes of each TCP connection, 48 a header or notice: docs/ledger.md."""
    assert next(iter(sends(("mean", 2 * 2 * 400_000 // 3, -1), 3))).messages == 8
    assert next(iter(sends(("mean", 2 * 3 * 10_000_000 // 4, -1), 4))).messages == 18
    assert next(iter(sends(("all_gather", 300_000, -1), 4))) == Send(0, 1, 300_000, 6)


def test_a_ring_crosses_each_box_once_and_all_to_all_as_often_as_it_has_pairs() -> None:
    boxes = boxes_of(8, per_box=4)
    calls = {("mean", 1400, -1): 2, ("all_to_all", 700, -1): 1}
    found = {(e.kind, e.link): e.num_bytes for e in entries(calls, boxes)}
    assert found[("mean", LinkClass.BETWEEN)] == 2 * 2 * 1400
    assert found[("mean", LinkClass.INSIDE)] == 2 * 6 * 1400
    assert found[("all_to_all", LinkClass.BETWEEN)] == 8 * 4 * 100
    assert found[("all_to_all", LinkClass.INSIDE)] == 8 * 3 * 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "per_box"), [(2, 1), (3, 2), (8, 3), (8, 4)])
def test_frames_that_leave_a_box_are_those_of_each_message_that_does(kind: str, size: int, per_box: int) -> None:
    boxes, headers, call = boxes_of(size, per_box), HeaderModel(), (kind, 70_000, 1)
    for box in boxes.ids:
        total = Frames()
        for send in sends(call, size):
            src, dst = boxes.of_rank[send.src].id, boxes.of_rank[send.dst].id
            if src == box != dst:
                total += headers.forward(send.num_bytes, send.messages)
            if dst == box != src:
                total += headers.backward(send.num_bytes, send.messages)
        found = leaving(call, boxes, box, headers)
        assert (found.num, found.num_bytes) == pytest.approx((total.num, total.num_bytes))


def test_what_stays_inside_a_box_puts_nothing_on_the_wire() -> None:
    boxes = boxes_of(4, per_box=4)
    for kind in KINDS:
        assert leaving((kind, 3000, 0), boxes, boxes.ids[0], HeaderModel()).num_bytes == 0


def test_a_ledger_leaves_out_what_was_before_it() -> None:
    stats = Stats()
    stats.count("mean", 1000)
    ledger = Ledger(stats, boxes_of(2))
    assert ledger.entries() == []
    assert ledger.predicted(ledger.boxes.ids[0]).num_bytes == 0
    stats.count("mean", 1000)
    once = ledger.predicted(ledger.boxes.ids[0])
    assert once.num_bytes > 1000
    stats.count("mean", 1000)
    assert ledger.predicted(ledger.boxes.ids[0]).num_bytes == pytest.approx(2 * once.num_bytes)


def test_the_unexplained_ratio_is_of_what_was_counted() -> None:
    assert unexplained_ratio(200, 190) == pytest.approx(0.05)
    assert unexplained_ratio(200, 210) == pytest.approx(0.05)
    assert unexplained_ratio(200, 0) == 1
    assert unexplained_ratio(0, 10) is None


@pytest.mark.parametrize("size", SIZES)
def test_ranks_learn_each_others_boxes(size: int) -> None:
    names = [Box(f"{rank // 2:016x}", f"höst{rank // 2}" + "x" * 80) for rank in range(size)]
    found = run_threads(size, lambda group: exchange_boxes(group, names[group.rank]))
    assert all(boxes == found[0] for boxes in found)
    assert [box.id for box in found[0].of_rank] == [box.id for box in names]
    assert found[0].ranks_in(names[0].id) == tuple(range(min(2, size)))


def test_ranks_of_one_process_share_a_box() -> None:
    boxes = run_threads(2, exchange_boxes)[0]
    assert boxes.link(0, 1) is LinkClass.INSIDE
    assert boxes.of_rank[0] == this_box()


def test_interfaces_are_read_without_loopback() -> None:
    text = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs ...\n"
        "    lo: 999 9 0 0 0 0 0 0 999 9 0 0 0 0 0 0\n"
        "  eth0:1000 10 0 0 0 0 0 0 2000 20 0 0 0 0 0 0\n"
    )
    assert read_interfaces(text) == {"eth0": 2000}


@pytest.mark.parametrize(("name", "why"), [("lo", "loopback"), ("no-such0", "is not an interface")])
def test_an_interface_that_cannot_be_counted_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_interface(name)


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_ledger_explains_the_frames_that_the_kernel_counted(hosts: int) -> None:
    """A law of bytes, not a speed: two-phase exchanges and full means over gloo, start-up of the group included."""
    spec = LabSpec(hosts=hosts, rate_mbit=1000)
    rank = [sys.executable, str(Path(__file__).with_name("ledger_rank.py")), "1000003", "30", "3"]
    with lab_or_skip(spec) as lab:
        result = lab.run(rank, time_limit_s=120).check()
    told = [json.loads(text.splitlines()[-1]) for text in result.stdout]
    assert all(one["calls"] == told[0]["calls"] for one in told)
    boxes = Boxes(tuple(Box(**box) for box in told[0]["boxes"]))
    calls = {(kind, num_bytes, src): times for kind, num_bytes, src, times in told[0]["calls"]}
    assert len(boxes.ids) == hosts, "each host of the lab is a box of its own"
    counted = {box: host.sent_bytes for box, host in zip(boxes.ids, result.counters, strict=True)}
    payload = sum(entry.num_bytes for entry in entries(calls, boxes))
    assert sum(counted.values()) > 1.04 * payload, "headers alone are 4.6 %"
    forgetful = {call: times for call, times in calls.items() if call[0] != "all_gather"}
    for box, num_bytes in counted.items():
        found = unexplained_ratio(num_bytes, predicted(calls, boxes, box))
        assert found is not None
        assert found <= 0.03, (box, counted)
        found = unexplained_ratio(num_bytes, predicted(forgetful, boxes, box))
        assert found is not None
        assert found > 0.03, "a collective that nobody counted must show"


def test_ordinary_ethernet_carries_1448_bytes_behind_66() -> None:
    assert (HeaderModel().mss, HeaderModel().frame) == (1448, 66)
    assert HeaderModel(ip=40).mss == 1428


def test_one_full_segment_is_one_frame_and_its_notice_another() -> None:
    headers = HeaderModel()
    assert headers.forward(1448 - 48, 1) == Frames(2, 1448 + 66 + 48 + 66)
    assert headers.forward(1448 - 47, 1) == Frames(3, 1449 + 2 * 66 + 48 + 66)


def test_a_receiver_answers_with_a_notice_a_message_and_an_ack_for_some_segments() -> None:
    headers = HeaderModel(segments_per_ack=2)
    assert headers.backward(4 * 1448 - 48, 1) == Frames(1 + 2, 48 + 66 + 2 * 66)
    assert headers.backward(0, 0) == Frames() == headers.forward(0, 0)


def test_frames_of_an_all_to_all_are_those_that_were_counted() -> None:
    """Per step and host over gloo, 1 Gbit/s: 2 hosts, a row of 1 MB; 3 messages of 33 KB and more in a ring."""
    headers = HeaderModel()

    def predicted(num_bytes: int, messages: int) -> float:
        return (headers.forward(num_bytes, messages) + headers.backward(num_bytes, messages)).num_bytes

    assert predicted(1_000_000, 1) == pytest.approx(1_047_790, rel=0.01)  # all_to_all, 2 hosts
    assert predicted(300_000, 6) == pytest.approx(316_150, rel=0.01)  # all_gather, 4 hosts
    assert predicted(600_000, 12) == pytest.approx(632_183, rel=0.01)  # all_reduce of 400 KB, 4 hosts
    assert predicted(15_000_000, 18) == pytest.approx(15_703_902, rel=0.01)  # all_reduce of 10 MB, 4 hosts


@pytest.mark.parametrize(("segments_per_ack", "most"), [(2, 0.017), (45, 0.005)])
def test_the_guess_at_acknowledgements_moves_the_sum_no_more_than_it_says(segments_per_ack: int, most: float) -> None:
    guessed, other = HeaderModel(), HeaderModel(segments_per_ack=segments_per_ack)
    forward = guessed.forward(10**8, 10).num_bytes
    difference = abs(other.backward(10**8, 10).num_bytes - guessed.backward(10**8, 10).num_bytes)
    assert difference / forward <= most


@pytest.mark.parametrize(
    ("field", "value"), [("mtu", 0), ("mtu", 50), ("gloo", -1), ("segments_per_ack", 0), ("ip", 2.5)]
)
def test_sizes_that_cannot_be_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"headers\.{field}"):
        HeaderModel(**{field: value})  # type: ignore[arg-type]


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


def test_bytes_by_link_are_those_of_this_rank_over_all_its_groups() -> None:
    links = LinkBytes()
    assert links.by_link() == dict.fromkeys(LINKS, 0)
    two_boxes = Boxes((Box("aa", "a"), Box("bb", "b"), Box("bb", "b")))
    stats = Stats()
    links.seated(stats, two_boxes, 1)
    stats.count("all_to_all", 2000)  # 1000 to rank 0 in the other box, 1000 to rank 2 in this one
    stats.count("mean", 600)  # the ring: to rank 0
    assert links.by_link() == {"inside_box": 1000, "between_boxes": 1600}
    assert sum(links.by_link().values()) == stats.sent_bytes
    later = Stats()
    links.seated(later, Boxes((Box("bb", "b"), Box("bb", "b"))), 0)
    later.count("all_gather", 50)
    assert links.by_link() == {"inside_box": 1050, "between_boxes": 1600}
