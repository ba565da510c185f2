"""However a lab ends, nothing is left: no process, no namespace, no interface."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.covering import parametrize
from tests.tools.lab.conftest import namespaces_of, network_namespaces
from thinwire.tools.lab import Lab, LabError, LabSpec, network
from thinwire.tools.lab.lab import find_labs

# An owner with a daemon in its lab and a forked child that inherits everything and lives on.
OWNER = """
import os, sys, time
from thinwire.tools.lab import Lab, LabSpec
with Lab(LabSpec(hosts=2, rate_mbit=100)) as lab:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    def say(line):
        print(child, lab.holder.pid, *lab.host_pids(), flush=True)
    lab.run(["sh", "-c", "setsid sleep 95 & setsid sleep 95 & echo; sleep 95"], on_line=say)
"""


def wait_for_the_end_of(pids: list[int], namespaces: set[str]) -> None:
    until = time.monotonic() + 20
    while any(alive(pid) for pid in pids) or namespaces & network_namespaces():
        assert time.monotonic() < until, "still there"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def interfaces() -> str:
    return "".join(sorted(os.listdir("/sys/class/net")))


@parametrize("number", [signal.SIGKILL, signal.SIGTERM], usual=[0])
def test_the_end_of_the_owner_is_the_end_of_the_lab(namespaces, spawned, number):
    before = interfaces()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    spawned.append(owner)
    child, *pids = map(int, owner.stdout.readline().split())
    try:
        made = namespaces_of(pids[1:])
        assert len(made) == 2
        assert made <= network_namespaces()
        owner.send_signal(number)
        owner.wait(20)
        wait_for_the_end_of(pids, made)
        assert alive(child)  # so the open socket that it inherited did not keep the lab up
    finally:
        os.kill(child, signal.SIGKILL)
    assert interfaces() == before


def test_an_exception_ends_it(namespaces):
    pids: list[int] = []
    made: set[str] = set()

    def fail(lab: Lab) -> None:
        pids.extend([lab.holder.pid, *lab.host_pids()])
        made.update(namespaces_of(pids[1:]))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Lab(LabSpec(2, 100)) as lab:
        fail(lab)
    assert len(made) == 2
    assert not any(alive(pid) for pid in pids)
    wait_for_the_end_of(pids, made)


@pytest.mark.parametrize("which", ["keeper", "init"])
def test_the_end_of_its_own_processes_is_said(namespaces, which):
    with Lab(LabSpec(2, 100)) as lab:
        pids = [lab.holder.pid, *lab.host_pids()]
        made = namespaces_of(pids[1:])
        found = next(one for one in find_labs() if one.pid == lab.holder.pid)
        os.kill(found.pid if which == "keeper" else found.init_pid, signal.SIGKILL)
        wait_for_the_end_of(pids, made)
        with pytest.raises(LabError, match="has ended"):
            lab.counters()


def test_a_refused_loss_leaves_nothing(namespaces):
    with Lab(LabSpec(1, 100)) as lab:
        if network.has_netem(lab.holder):
            pytest.skip("this kernel has netem")
    before = network_namespaces()
    with pytest.raises(LabError, match=r"loss = 0.01(.|\n)*netem"), Lab(LabSpec(2, 100, loss=0.01)):
        pytest.fail("a lab without the loss that was asked for")
    wait_for_the_end_of([], network_namespaces() - before)
    assert not [lab for lab in find_labs() if lab.owner_pid == os.getpid()]


def test_a_kernel_without_token_buckets_is_said_and_nothing_is_left(namespaces, monkeypatch):
    monkeypatch.setattr(network, "_bucket", lambda interface, shaping: f"qdisc add dev {interface} root no_such_kind\n")
    with pytest.raises(LabError, match=r"sch_tbf(.|\n)*modprobe"), Lab(LabSpec(2, 100)):
        pytest.fail("a lab without shaping")
    assert not [lab for lab in find_labs() if lab.owner_pid == os.getpid()]


def test_without_root_it_says_so(namespaces):
    script = (
        "import os; from thinwire.tools.lab import *; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n    Lab(LabSpec(2, 100)).__enter__()\nexcept LabError as error: print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "needs root" in ended.stdout
    assert "sudo" in ended.stdout


def test_root_without_the_capabilities_is_told_which(namespaces):
    if not os.path.exists("/usr/bin/setpriv"):
        pytest.skip("needs setpriv of util-linux")
    script = (
        "from thinwire.tools.lab import *\n"
        "try:\n    Lab(LabSpec(2, 100)).__enter__()\nexcept LabError as error: print(error)"
    )
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CAP_SYS_ADMIN" in ended.stdout
