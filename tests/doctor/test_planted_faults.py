"""Each fault that is planted is named, with the box or the pair that has it, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.clinic import Clinic


@pytest.fixture
def folder(namespaces: None, tmp_path: Path) -> Path:
    return tmp_path


def test_two_boxes_without_a_fault(folder: Path) -> None:
    with Clinic(folder) as clinic:
        clinic.listen(1)
        said = clinic.ask()
    assert (said.exit_code, said.kinds) == (0, set())
    visit = said.document["calls"][0]["visit"]
    assert visit["frame_bytes"] == 1500
    assert 0.0 < visit["there_mbit"] < 60.0


@pytest.mark.slow
def test_large_frames_that_vanish(folder: Path) -> None:
    with Clinic(folder) as clinic:
        for host in range(2):
            clinic.shell(host, "ip link set dev eth0 mtu 4000")
        clinic.listen(1)
        said = clinic.ask()
    found = said.found("mtu")
    assert said.exit_code == 1
    assert "up to 4000 bytes, 1500 arrive" in found["what"]
    assert "Set the MTU of these boxes to 1500" in found["change"]
    assert set(found["boxes"]) == {"anna", "bert"}
    assert said.kinds == {"mtu"}


@pytest.mark.slow
def test_one_slow_link(folder: Path) -> None:
    with Clinic(folder, hosts=3) as clinic:
        slow = "root handle 1: tbf rate 5mbit burst 16384 limit 65536"
        clinic.shell(2, f"tc qdisc replace dev eth0 {slow}")
        clinic.shell(-1, f"tc qdisc replace dev port2 {slow}")
        clinic.listen(1)
        clinic.listen(2)
        said = clinic.ask()
    found = said.found("slow link")
    assert (said.exit_code, found["boxes"]) == (1, ["carl"])
    assert said.kinds == {"slow link"}
