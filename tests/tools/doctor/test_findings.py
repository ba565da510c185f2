"""What follows from facts and measurements, without any box."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.cli.doctor import as_text, exit_code
from thinwire.tools.doctor.examination import BoxReport, Call, Examination, rounds
from thinwire.tools.doctor.facts import Facts, Folder, Gpu, Interface, unwritable
from thinwire.tools.doctor.finding import Blame, Finding, Wishes, blamed
from thinwire.tools.doctor.findings import findings
from thinwire.tools.doctor.probe import Visit

NAMES = ("anna", "bert", "carl", "dora")
EVERY = [(a, b) for a in range(4) for b in range(4) if a != b]


def facts(number: int, **changes: Any) -> Facts:
    card = Interface(name="eth0", up=True, mtu=1500, speed_mbit=None, addresses=(f"10.0.0.{number + 1}",))
    folder = Folder(path="/tmp", free_bytes=100 << 30, total_bytes=200 << 30, free_files=None, problem=None)
    known = {
        "hostname": NAMES[number],
        "system": "Linux 6",
        "python": "3.11.7",
        "versions": {"thinwire": "0.1.0", "torch": "2.11.0"},
        "cpus": 8,
        "memory_bytes": 64 << 30,
        "available_bytes": 60 << 30,
        "interfaces": (card,),
        "folders": (folder,),
        "files": {},
        "gpus": (),
        "gpu_problem": None,
        "environment": {},
        "hostname_address": None,
        "ports": (32768, 60999),
    }
    return Facts(**{**known, **changes})


def healthy(source: int, **changes: Any) -> Visit:
    known = {
        "connect": "ok",
        "address": f"10.0.0.{source + 1}",
        "round_trip_ms": 0.2,
        "clock_s": 0.001,
        "clock_error_s": 0.0001,
        "ports": {7000: "ok"},
        "sends_large": True,
        "hears_large": True,
        "frame_bytes": 1500,
        "there_mbit": 940.0,
        "back_mbit": 940.0,
        "both_there_mbit": 930.0,
        "both_back_mbit": 930.0,
    }
    return Visit(**{**known, **changes})


def examined(*boxes: Facts, visits: dict[tuple[int, int], dict[str, Any]] | None = None) -> Examination:
    """Boxes that have visited each other; `visits`: what is not as it should be."""
    patients = tuple(BoxReport(where=f"10.0.0.{place + 1}:7655", facts=box) for place, box in enumerate(boxes))
    pairs = [(a, b) for a in range(len(boxes)) for b in range(len(boxes)) if a != b]
    changed = visits or {}
    calls = tuple(Call(source=a, target=b, visit=healthy(a, **changed.get((a, b), {}))) for a, b in pairs)
    return Examination(boxes=patients, calls=calls, ports=(7000,))


def one_of(seen: Examination, wishes: Wishes | None = None) -> Finding:
    (found,) = findings(seen, wishes or Wishes())
    return found


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    seen = examined(facts(0), facts(1), facts(2))
    found = findings(seen, Wishes(interface="eth0", rate_mbit=1000.0, workers=24))
    assert found == []
    assert exit_code(seen, found) == 0
    assert "Nothing found that would hurt a job: 3 boxes and 3 links examined." in as_text(seen, found)


def test_a_package_that_one_box_has_and_another_lacks_is_a_warning() -> None:
    versions = {"thinwire": "0.1.0", "torch": "2.11.0"}
    found = one_of(examined(facts(0), facts(1, versions=versions | {"torchvision": "0.26.0"}), facts(2)))
    assert (found.kind, found.severity, found.boxes) == ("version", "warning", ("bert",))
    assert "torchvision differs: missing on anna, carl; 0.26.0 on bert" in found.what


def test_both_directions_that_share_one_speed() -> None:
    shared = {"both_there_mbit": 500.0, "both_back_mbit": 450.0}
    found = one_of(examined(facts(0), facts(1), visits={(0, 1): shared, (1, 0): shared | {"there_mbit": None}}))
    assert (found.kind, found.boxes) == ("half duplex", ("anna", "bert"))
    assert "940 and 940 Mbit/s alone, 950 together" in found.what


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"gpu_problem": "Driver/library version mismatch"}, "gpu", "Driver/library version mismatch"),
        ({"gpus": (Gpu(name="H200", driver="570", memory_mib=1000, used_mib=900),)}, "gpu", "900 of 1000 MiB in use"),
        ({"available_bytes": 100 << 20}, "memory", "100 MiB of memory are left"),
        ({"files": {"/data": "No such file or directory"}}, "file", "/data cannot be read: No such file"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "interface", "wants the interface ib0: there is none"),
    ],
)
def test_what_is_wrong_with_a_box_alone(changes: dict[str, Any], kind: str, words: str) -> None:
    seen = examined(facts(0, **changes))
    found = one_of(seen)
    assert (found.kind, found.boxes) == (kind, ("anna",))
    assert words in found.what
    assert exit_code(seen, [found]) == 1
    assert found.change in as_text(seen, [found])


def test_links_below_what_their_cards_or_their_owner_say() -> None:
    slow = {"there_mbit": 94.0, "back_mbit": 94.0, "both_there_mbit": 90.0, "both_back_mbit": 90.0}
    card = Interface(name="eth0", up=True, mtu=1500, speed_mbit=1000, addresses=("10.0.0.1", "10.0.0.2"))
    boxes = (facts(0, interfaces=(card,)), facts(1, interfaces=(card,)))
    found = one_of(examined(*boxes, visits={(0, 1): slow, (1, 0): slow}))
    assert (found.kind, found.what) == ("slow link", "slow between anna and bert: 94 Mbit/s; 1000 are expected")
    expected = one_of(examined(facts(0), facts(1), visits={(0, 1): slow, (1, 0): slow}), Wishes(rate_mbit=200.0))
    assert expected.what == "slow between anna and bert: 94 Mbit/s; 200 are expected"


def test_a_job_that_wants_more_workers_than_there_are() -> None:
    found = one_of(examined(facts(0), facts(1)), Wishes(workers=17))
    assert found.what == "the job needs at least 17 workers, and the boxes have 16 CPUs: one for each"
    assert one_of(examined(facts(0)), Wishes(workers=1, device="gpu")).kind == "too few"


def test_nobody_who_answers_is_nothing_examined() -> None:
    silent = BoxReport(where="10.0.0.1:7655", connect="silent", why="10.0.0.1:7655 does not answer")
    seen = Examination(boxes=(silent,))
    assert exit_code(seen, findings(seen, Wishes())) == 2


def test_who_is_to_blame_for_bad_pairs() -> None:
    both = {pair for pair in EVERY if 3 in pair}
    out = {pair for pair in EVERY if pair[0] == 3}
    assert blamed(both, EVERY) == [Blame("box", 3, tuple(sorted(both)))]
    assert blamed(out, EVERY) == [Blame("out", 3, tuple(sorted(out)))]
    assert blamed([(0, 1), (1, 0), (2, 3)], EVERY) == [
        Blame("both", None, ((0, 1), (1, 0))),
        Blame("pair", None, ((2, 3),)),
    ]
    assert [one.what for one in blamed(EVERY, EVERY)] == ["all"]
    assert blamed([], EVERY) == []


@pytest.mark.parametrize("number", [2, 3, 4, 7, 8])
def test_every_pair_is_measured_once_and_no_box_twice_at_a_time(number: int) -> None:
    turns = rounds(range(number))
    met = [frozenset(pair) for pairs in turns for pair in pairs]
    assert len(met) == len(set(met)) == number * (number - 1) // 2
    for pairs in turns:
        places = [place for pair in pairs for place in pair]
        assert len(places) == len(set(places))


def test_a_store_that_nobody_opens_is_told_with_those_that_are_opened():
    assert "A store is an absolute folder" in unwritable("foo://x")
