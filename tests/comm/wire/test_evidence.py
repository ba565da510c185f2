from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.comm.groups.threads import ThreadGroup, run_threads
from thinwire.comm.wire.evidence import BoxCounters, GroupCalls, Run, check, evidence, load, main, write
from thinwire.comm.wire.evidence_check import digest
from thinwire.comm.wire.evidence_counters import gather_counters, lab_counters
from thinwire.comm.wire.headers import HeaderModel
from thinwire.comm.wire.interface_counters import InterfaceCounters
from thinwire.comm.wire.link_classes import Box, Boxes
from thinwire.lab import HostCounters

BOXES = Boxes((Box("00000000000000aa", "a"), Box("00000000000000bb", "b")))


def counters(box: Box, sent: int) -> BoxCounters:
    return BoxCounters(box.id, "tbf", "eth0", 500, 500 + sent, 5, 5 + sent // 1500)


@pytest.fixture
def whole() -> dict[str, Any]:
    calls = {("mean", 100_000, -1): 3, ("all_to_all", 5_000, -1): 7, ("broadcast", 900, 0): 1}
    return evidence(
        Run("onebit_adam", 10, 1000.0, {"why": "a test"}),
        BOXES,
        [counters(BOXES.of_rank[0], 360_000), counters(BOXES.of_rank[1], 358_000)],
        [GroupCalls((0, 1), calls)],
        HeaderModel(),
    )


def test_a_whole_file_fits_after_a_round_trip(whole: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    write(path, whole)
    assert load(path) == whole
    assert check(load(path)) == []
    assert main(["check", str(path)]) == 0
    assert list(tmp_path.iterdir()) == [path]


def test_the_sums_are_what_a_reader_can_work_out(whole: dict[str, Any]) -> None:
    rows = {row["kind"]: row for row in whole["ledger"]}
    assert rows["mean"]["num_bytes"] == 2 * 3 * 100_000
    assert rows["all_to_all"]["messages"] == 2 * 7
    assert rows["broadcast"] == {
        "kind": "broadcast",
        "link": "between boxes",
        "collectives": 1,
        "num_bytes": 900,
        "messages": 1,
    }
    counted, predicted = 718_000, sum(whole["predicted_bytes"].values())
    assert sum(whole["counted_bytes"].values()) == counted
    assert whole["unexplained_ratio"] == pytest.approx(abs(counted - predicted) / counted)


TAMPERED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("counted_bytes.00000000000000aa", lambda f: f["counters"][0].update(sent_bytes_after=360_400)),
    ("unexplained_ratio", lambda f: f.update(unexplained_ratio=0.001)),
    ("predicted_bytes.00000000000000bb", lambda f: f["predicted_bytes"].update({"00000000000000bb": 1.0})),
    ("ledger", lambda f: f["groups"][0]["calls"][0].update(times=8)),
    ("ledger[1].num_bytes", lambda f: f["ledger"][1].update(num_bytes=1)),
    ("predicted_bytes", lambda f: f["headers"].update(segments_per_ack=2)),
    ("sha256", lambda f: f.update(optimizer="adam")),
    ("sha256", lambda f: f["notes"].update(why="another")),
    ("sha256", lambda f: f["versions"].update(torch="9.9")),
    ("counters[1].sent_frames_after", lambda f: f["counters"][1].update(sent_frames_after=1)),
    ("counters", lambda f: f["counters"].pop()),
    ("counters", lambda f: f["counters"].append(f["counters"][0])),
    ("groups[0].ranks", lambda f: f["groups"][0].update(ranks=[0, 2])),
    ("groups[0].ranks", lambda f: f["groups"][0].update(ranks=[[0], 1])),
    ("groups[0].calls[0].kind", lambda f: f["groups"][0]["calls"][0].update(kind="scatter")),
    ("groups[0].calls[0].src", lambda f: f["groups"][0]["calls"][0].update(src=1)),
    ("groups[0].calls: two rows", lambda f: f["groups"][0]["calls"].append(f["groups"][0]["calls"][0])),
    ("headers.mtu", lambda f: f["headers"].update(mtu=10)),
    ("steps", lambda f: f.update(steps=-1)),
    ("steps: expected int", lambda f: f.update(steps="10")),
    ("steps: expected int", lambda f: f.update(steps=True)),
    ("schema", lambda f: f.update(schema=2)),
    ("topology.ranks[0].id: is missing", lambda f: f["topology"]["ranks"][0].pop("id")),
    ("extra: is not a field", lambda f: f.update(extra=1)),
    ("counters[0]: expected an object", lambda f: f["counters"].__setitem__(0, 3)),
]


@pytest.mark.parametrize(("field", "tamper"), TAMPERED, ids=[str(i) + name for i, (name, _) in enumerate(TAMPERED)])
def test_a_changed_file_is_refused_by_the_name_of_the_field(
    whole: dict[str, Any], field: str, tamper: Callable[[dict[str, Any]], object]
) -> None:
    changed = copy.deepcopy(whole)
    tamper(changed)
    assert any(complaint.startswith(field) for complaint in check(changed)), check(changed)


def test_a_new_checksum_does_not_hide_a_changed_sum(whole: dict[str, Any]) -> None:
    whole["unexplained_ratio"] = 0.0001
    whole["sha256"] = digest(whole)
    assert [complaint.split(":")[0] for complaint in check(whole)] == ["unexplained_ratio"]


def test_every_field_is_needed(whole: dict[str, Any]) -> None:
    for name in whole:
        rest = {key: value for key, value in whole.items() if key != name}
        assert any(complaint.startswith(f"{name}:") for complaint in check(rest)), name


def test_parts_that_do_not_fit_make_no_file() -> None:
    with pytest.raises(ValueError, match="counters: are of boxes"):
        evidence(Run("adam", 1), BOXES, [counters(BOXES.of_rank[0], 9)], [GroupCalls((0, 1), {})], HeaderModel())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_learns_what_the_first_of_each_box_has_read(size: int) -> None:
    boxes = Boxes(tuple(Box(f"{rank // 2:016x}", "x") for rank in range(size)))

    def work(group: ThreadGroup) -> list[BoxCounters]:
        before = InterfaceCounters(f"eth{group.rank}", 10, 2**40 + group.rank, 0, 0)
        after = InterfaceCounters(f"eth{group.rank}", 20, 2**41 + group.rank, 0, 0)
        return gather_counters(group, boxes, before, after)

    found = run_threads(size, work)
    assert found == [found[0]] * size
    assert found[0] == [
        BoxCounters(box, "interface", f"eth{2 * at}", 2**40 + 2 * at, 2**41 + 2 * at, 10, 20)
        for at, box in enumerate(boxes.ids)
    ]


def test_as_many_boxes_as_hosts() -> None:
    host = HostCounters(0, 1, 100, 0, 0, 0, 0)
    assert lab_counters(BOXES, [host] * 2, [host] * 2)[1].box == BOXES.ids[1]
    with pytest.raises(ValueError, match="boxes"):
        lab_counters(BOXES, [host], [host])


def test_the_command_says_what_does_not_fit(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.json").write_text(json.dumps(whole)[:-9])
    (tmp_path / "list.json").write_text("[]")
    whole["steps"] += 1
    (tmp_path / "changed.json").write_text(json.dumps(whole))
    for name, why in (
        ("cut.json", "Unterminated"),
        ("list.json", "JSON object"),
        ("changed.json", "sha256"),
        ("none.json", "No such file"),
    ):
        assert main(["check", str(tmp_path / name)]) == 1
        assert why in capsys.readouterr().out
    assert main(["verify"]) == 2
