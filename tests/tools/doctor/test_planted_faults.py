"""Each fault that is planted is named, with the box or the pair that has it, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.doctor.box import PORT
from tests.tools.doctor.clinic import Clinic


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


@pytest.mark.slow
def test_one_direction_that_is_slow(folder: Path) -> None:
    with Clinic(folder) as clinic:
        clinic.shell(1, "tc qdisc replace dev eth0 root handle 1: tbf rate 5mbit burst 16384 limit 65536")
        clinic.listen(1)
        said = clinic.ask()
    found = said.found("asymmetry")
    assert found["what"].startswith("slow from bert to anna: 5 Mbit/s, and 4")
    assert (said.exit_code, said.kinds) == (1, {"asymmetry"})


@pytest.mark.slow
def test_a_port_that_a_firewall_closes(folder: Path) -> None:
    with Clinic(folder, hosts=3) as clinic:
        # What port 7000 of this host answers goes nowhere: whoever connects hears nothing.
        clinic.shell(1, "ip rule add ipproto tcp sport 7000 blackhole")
        clinic.listen(1)
        clinic.listen(2)
        said = clinic.ask("--ports", "7000", "--seconds", "0")
    found = said.found("firewall")
    assert found["what"] == "TCP port 7000 cannot be reached from anna to bert; carl to bert: no answer"
    assert found["change"] == "Open TCP port 7000 in the firewall on bert, inwards."
    assert (said.exit_code, said.kinds) == (1, {"firewall"})


@pytest.mark.slow
def test_ports_that_the_kernel_chooses_and_a_firewall_closes(folder: Path) -> None:
    """The doctor's own port is open: without one more, nobody would see what a job meets."""
    with Clinic(folder) as clinic:
        clinic.shell(1, "ip rule add pref 2 ipproto tcp sport 32768-60999 blackhole")
        clinic.shell(1, f"ip rule add pref 1 ipproto tcp dport {PORT} lookup main")
        clinic.listen(1)
        said = clinic.ask("--seconds", "0")
    found = said.found("firewall")
    assert "TCP ports that the kernel chooses (32768 to 60999), as workers use, cannot be reached" in found["what"]
    assert (said.exit_code, said.kinds) == (1, {"firewall"})


@pytest.mark.slow
def test_an_interface_that_one_box_lacks(folder: Path) -> None:
    with Clinic(folder) as clinic:
        clinic.shell(
            0,
            "ip link add fast0 type veth peer name fast1 && ip addr add 10.99.0.1/24 dev fast0 && ip link set fast0 up",
        )
        clinic.listen(1)
        said = clinic.ask("--interface", "fast0", "--seconds", "0")
    missing, other = (one for one in said.document["findings"] if one["kind"] == "interface")
    assert missing["boxes"] == ["bert"]
    assert (
        "bert: the job or --interface wants the interface fast0: there is none; there are eth0 (10.84.0.2)"
        in missing["what"]
    )
    assert (
        other["what"] == "anna: the job or --interface wants the interface fast0, but anna reaches the others by eth0"
    )
    assert (said.exit_code, said.kinds) == (1, {"interface"})


@pytest.mark.slow
def test_a_clock_and_a_version_that_differ(folder: Path) -> None:
    with Clinic(folder, hosts=3) as clinic:
        clinic.listen(1)
        clinic.listen(2, "-7.5", "torch=1.0.0")
        said = clinic.ask("--seconds", "0")
    clock, version = said.found("clock"), said.found("version")
    assert clock["boxes"] == version["boxes"] == ["carl"]
    assert clock["what"].startswith("the clock of carl is 7.5")
    assert clock["what"].endswith("s behind the others'")
    assert "1.0.0 on carl" in version["what"]
    assert (said.exit_code, said.kinds) == (1, {"clock", "version"})


@pytest.mark.slow
def test_a_disk_that_is_full(folder: Path) -> None:
    store = folder / "store"
    store.mkdir()
    with Clinic(folder) as clinic:
        clinic.shell(1, f"mount -t tmpfs -o size=1m none {store}; cat /dev/zero > {store}/all 2> /dev/null || true")
        clinic.listen(1)
        said = clinic.ask("--store", str(store), "--seconds", "0")
    found = said.found("disk")
    assert found["boxes"] == ["bert"]
    assert f"{store} cannot be used, 0 MiB free: No space left on device" in found["what"]
    assert (said.exit_code, said.kinds) == (1, {"disk"})


@pytest.mark.slow
def test_a_store_that_is_another_folder_on_each_box(folder: Path) -> None:
    store = folder / "store"
    store.mkdir()
    with Clinic(folder) as clinic:
        clinic.shell(1, f"mount -t tmpfs none {store}")
        clinic.listen(1)
        said = clinic.ask("--store", str(store), "--seconds", "0")
    assert said.found("store")["what"].startswith(f"bert: {store} is another folder than on anna")
    assert (said.exit_code, said.kinds) == (1, {"store"})
    assert list(store.iterdir()) == []


@pytest.mark.slow
def test_boxes_that_cannot_be_reached_for_three_reasons(folder: Path) -> None:
    with Clinic(folder, hosts=3) as clinic:
        clinic.listen(1, token="another token, long enough too")
        elsewhere, bert, carl = "10.99.0.1", *clinic.lab.addresses[1:]
        said = clinic.ask("--seconds", "0", peers=f"{elsewhere},{bert},{carl}")
    assert said.kinds == {"no route", "token", "not listening"}
    assert said.found("no route")["boxes"] == [f"{elsewhere}:{PORT}"]
    assert "Network is unreachable" in said.found("no route")["what"]
    assert "the tokens differ" in said.found("token")["what"]
    assert said.found("not listening")["boxes"] == [f"{carl}:{PORT}"]
    assert said.exit_code == 1
