"""Hosts that exchange bytes: what they find, what is counted, how runs end."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time

import pytest

from thinwire.cli.lab import measure
from thinwire.tools.lab import Lab, LabError, LabRunFailed, LabSpec, Line, difference

PAYLOAD = 2_000_000
MSS, HEADERS = 1448, 66  # Ethernet 14, IP 20, TCP 32 with timestamps

# Rank argv[1] sends PAYLOAD bytes to rank argv[2]; the others do nothing.
TRANSFER = """
import os, socket, sys, time
sender, receiver, address, size = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rank = int(os.environ["RANK"])
if rank == receiver:
    with socket.create_server((address, 5000)) as server:
        link, _ = server.accept()
        got = 0
        while part := link.recv(1 << 16):
            got += len(part)
    print(got)
elif rank == sender:
    for _ in range(200):
        try:
            link = socket.create_connection((address, 5000), timeout=20)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.sendall(bytes(size))
    link.close()
"""


def transfer(lab: Lab, sender: int, receiver: int, size: int = PAYLOAD):
    address = lab.addresses[lab.spec.host_of(receiver)]
    program = [sys.executable, "-I", "-S", "-c", TRANSFER, str(sender), str(receiver), address, str(size)]
    result = lab.run(program, time_limit_s=60).check()
    assert int(result.stdout[receiver]) == size
    return result


def test_the_counters_see_payload_and_headers_at_both_ends(lab):
    sender, receiver = transfer(lab, 0, 2).counters
    data = PAYLOAD + math.ceil(PAYLOAD / MSS) * HEADERS
    assert data <= sender.sent_bytes <= 1.03 * data
    assert sender.sent_frames >= PAYLOAD / MSS
    # What left host 0 came to host 1, and nothing else: no ARP, no IPv6, no frame of the machine's.
    assert sender.sent_bytes - receiver.received_bytes == 0 or receiver.received_drops
    assert sender.sent_frames - receiver.received_frames == receiver.received_drops
    assert receiver.sent_frames - sender.received_frames == sender.received_drops


def test_an_idle_lab_counts_nothing(lab):
    before = lab.counters()
    time.sleep(0.3)
    assert all(one.sent_bytes == one.received_bytes == 0 for one in difference(lab.counters(), before))


def test_ranks_of_one_box_do_not_use_its_link(lab):
    inside = transfer(lab, 0, 1).counters
    assert all(one.sent_bytes == one.received_bytes == 0 for one in inside)
    across = transfer(lab, 1, 3).counters
    assert across[0].sent_bytes > PAYLOAD


def test_links_are_shaped_at_both_ends(lab):
    printed = lab.holder.outputs([0, 1, 2], ["tc", "-j", "qdisc", "show"], [""] * 3)
    buckets = [qdisc for text in printed for qdisc in json.loads(text) if qdisc["kind"] == "tbf"]
    assert sorted(qdisc["dev"] for qdisc in buckets) == ["eth0", "eth0", "port0", "port1"]
    for qdisc in buckets:
        assert qdisc["options"]["rate"] == 100e6 / 8
        assert qdisc["options"]["burst"] == pytest.approx(lab.shaping.bucket_bytes, rel=0.01)
    links = json.loads(lab.holder.output(1, ["ip", "-j", "-d", "link", "show", "eth0"]))
    assert links[0]["gso_max_size"] == lab.shaping.gso_bytes


def test_the_delay_is_there_and_tcp_is_the_same_everywhere(lab):
    if lab.delay_made_by == "netem":
        assert "delay 100us" in lab.holder.output(0, ["tc", "qdisc", "show"])
    else:
        assert lab.delay_made_by == "NAPI timer"
        assert lab.holder.output(1, ["cat", "/sys/class/net/eth0/gro_flush_timeout"]).strip() == "100000"
    settings = lab.holder.output(1, ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"])
    assert settings.strip() == "reno"


def test_the_round_trip_takes_at_least_the_delay(namespaces):
    with Lab(LabSpec(hosts=2, rate_mbit=100, delay_ms=2.0)) as slow:
        found = measure(slow, seconds=0.2)
    assert found.round_trip_ms >= 2.0  # one direction's worth: a timer may have been about to fire
    assert 0 < found.there_mbit < 100


def test_every_rank_knows_its_place(lab):
    result = lab.run(["env"], env={"OWN": "x"}, omp_num_threads=3).check()
    for rank, text in enumerate(result.stdout):
        found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        assert found["RANK"] == str(rank)
        assert found["WORLD_SIZE"] == "4"
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert found["NODE_RANK"] == found["GROUP_RANK"] == str(rank // 2)
        assert found["MASTER_ADDR"] == lab.addresses[0]
        assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "eth0"
        assert (found["OMP_NUM_THREADS"], found["OWN"]) == ("3", "x")


def test_two_runs_have_two_ports(lab):
    ports = {lab.run(["sh", "-c", "echo $MASTER_PORT"]).check().stdout[0] for _ in range(2)}
    assert len(ports) == 2


def test_lines_come_as_they_are_written_and_the_end_is_kept(lab):
    lines: list[Line] = []
    script = "echo out $RANK; printf unfinished >&2"
    result = lab.run(["sh", "-c", script], on_line=lines.append).check()
    assert {(line.rank, line.stream, line.text) for line in lines} == {
        (rank, *line) for rank in range(4) for line in (("stdout", f"out {rank}"), ("stderr", "unfinished"))
    }
    assert result.stdout[3] == "out 3\n"
    assert result.stderr[3] == "unfinished"


def test_a_long_output_keeps_its_end(lab):
    result = lab.run(["sh", "-c", "yes | head -c 4000000; echo the end"]).check()
    assert all(len(text) == 1 << 20 and text.endswith("the end\n") for text in result.stdout)


def test_each_rank_may_have_a_command_of_its_own(lab):
    result = lab.run([["echo", str(rank)] for rank in range(4)]).check()
    assert result.stdout == ("0\n", "1\n", "2\n", "3\n")
    with pytest.raises(ValueError, match="4 ranks"):
        lab.run([["echo"]] * 3)
    with pytest.raises(ValueError, match="list of words"):
        lab.run("echo")


def test_a_failing_rank_ends_the_others(lab):
    began = time.monotonic()
    result = lab.run(["sh", "-c", "[ $RANK = 2 ] && { echo why >&2; exit 3; }; sleep 100"], grace_s=0.2)
    assert time.monotonic() - began < 50
    assert (result.first_failed, result.worst, result.timed_out) == (2, 3, False)
    assert result.returncodes == (-15, -15, 3, -15)
    with pytest.raises(LabRunFailed, match=r"rank 2 failed(.|\n)*why"):
        result.check()


def test_time_is_over_for_those_who_do_not_listen_too(lab):
    result = lab.run(["sh", "-c", "trap '' TERM; sleep 100 & wait; sleep 100"], time_limit_s=2.0)
    assert (result.timed_out, result.worst, result.first_failed) == (True, 124, None)
    assert set(result.returncodes) == {-9}
    with pytest.raises(LabRunFailed, match="not done"):
        result.check()


def test_a_command_that_does_not_exist_is_named(lab):
    result = lab.run(["no-such-command"])
    assert set(result.returncodes) == {127}
    assert "no-such-command: No such file" in result.stderr[0]


def wait_until_gone(lab, command):
    """What is killed may be listed for a moment more."""
    until = time.monotonic() + 10
    while command in lab.holder.output(0, ["sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '"]):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_a_command_leaves_behind_ends_with_it(lab):
    lab.run(["sh", "-c", "sleep 97 & exit 0"]).check()
    wait_until_gone(lab, "sleep 97")


def test_an_error_of_the_one_who_listens_ends_the_ranks(lab):
    def listen(line: Line) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.run(["sh", "-c", "echo hello; sleep 96"], on_line=listen)
    wait_until_gone(lab, "sleep 96")


def test_a_single_command_can_be_started_and_killed(lab):
    process = lab.start(1, ["sleep", "94"])
    assert process.poll() is None
    process.signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    process.signal(signal.SIGKILL)  # it has ended: nothing happens
    with pytest.raises(LabError, match="hosts 0 to 1"):
        lab.start(2, ["true"])
    with pytest.raises(TimeoutError):
        lab.start(0, ["sleep", "94"]).wait(0.05)


def test_runs_leave_no_descriptors_open(lab):
    lab.run(["true"]).check()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        lab.run(["true"]).check()
        lab.counters()
        with pytest.raises(LabError, match="no-such-command"):
            lab.holder.output(1, ["no-such-command"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_counters_can_be_read_while_ranks_run(lab):
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(lab.counters()))
    lab.run(["sh", "-c", "echo go; sleep 0.3"], on_line=lambda line: thread.ident or thread.start()).check()
    thread.join()
    assert len(seen) == 2


def test_two_labs_do_not_meet(lab):
    with Lab(LabSpec(hosts=2, rate_mbit=200)) as other:
        assert other.addresses == lab.addresses
        before = lab.counters()
        assert transfer(other, 0, 1).counters[0].sent_bytes > PAYLOAD
        assert all(one.sent_bytes == 0 for one in difference(lab.counters(), before))
        transfer(lab, 0, 2, size=1000)
    transfer(lab, 0, 2, size=1000)


def test_three_hosts_are_joined(namespaces):
    with Lab(LabSpec(hosts=3, rate_mbit=1000)) as three:
        counters = transfer(three, 2, 1).counters
    assert counters[2].sent_bytes > PAYLOAD
    assert counters[1].received_bytes > PAYLOAD
    assert counters[0].sent_frames == counters[0].received_frames == 0  # a switch, not a hub
