"""A node's loss on a real Ray of several machines: no power, no way to the others, another address when it is back.

Each prints what it measured; benchmarks/results/nodes has the output of a run.
"""

import time

import pytest

from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from tests.workers.elastic.machines import HEAD, Machines, NodesJob

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("namespaces")]
pytest.importorskip("ray")

NODE_DEAD_S = 115.0
"""By then Ray's head has given up a node that vanished: eight health checks of 10 s with 3 s between them."""


@pytest.fixture
def started(tmp_path):
    """A job that trains on so many hosts; `more` stand by without Ray."""
    made = []

    def start(hosts, low, *, more=0):
        machines = Machines(hosts + more).__enter__()
        made.append(machines)
        for host in range(1, hosts + 1):
            machines.join(host)
        for host in range(1, hosts + 1):
            machines.wait_node(host, alive=True)
        job = NodesJob(machines, tmp_path / "job", low, hosts)
        job.drive()
        job.wait_trained(hosts)
        job.settle()
        return machines, job

    yield start
    for machines in made:
        machines.close()


def told(what, began, *firsts):
    """Print the seconds from `began` to each of these first steps."""
    sizes = ", ".join(f"{first['size']} train after {first['time'] - began:.1f} s" for first in firsts)
    print(f"{what}: {sizes}")


def clean(job):
    """No step by two, none redone, all replicas alike; and the job ends when it is told to."""
    found = job.check()
    assert found.violations == (), job.tail()
    job.stop()
    print(f"{found.committed} steps: {found.redone} redone, {found.commits_by_two} committed by two groups")


def test_a_node_without_power_is_replaced_by_another_and_a_dead_one_comes_back_with_another_address(started):
    machines, job = started(2, 1, more=1)
    machines.join(3)
    machines.wait_node(3, alive=True)

    before = job.generation()
    lost = machines.power_off(2)
    one = job.wait_trained(1, lost, before)
    two = job.wait_trained(2, lost, one["generation"])
    told("a node lost its power, another stood by", lost, one, two)
    assert job.trainers() == [1, 3]
    given_up = machines.wait_node(2, alive=False, since=lost)
    print(f"Ray gave it up after {given_up['time'] - lost:.1f} s: {given_up['why']}")
    assert "place_elsewhere slot=" in job.log(), "its slot waited until Ray gave up the node"

    before = job.generation()
    killed = time.time()
    machines.kill_all(1)
    one = job.wait_trained(1, killed, before)
    given_up = machines.wait_node(1, alive=False, since=killed)
    told("all processes of a node were killed", killed, one)
    print(f"Ray gave it up after {given_up['time'] - killed:.1f} s: {given_up['why']}")
    machines.readdress(1, "10.84.0.77")
    joined = machines.join(1)
    machines.wait_node(1, alive=True, since=joined)
    two = job.wait_trained(2, joined, one["generation"])
    told("it was started again, with another address", joined, two)
    clean(job)


def test_of_two_nodes_that_do_not_reach_each_other_one_is_left_out_and_named(started):
    machines, job = started(2, 1)
    before = job.generation()
    machines.cut_pair(1, 2)
    time.sleep(5.0)
    machines.mend_pair(1, 2)
    mended = time.time()
    print(
        f"a pair was cut for 5 s: the next step {job.wait_step_after(mended)['time'] - mended:.1f} s after the mending"
    )
    job.settle()
    assert job.generation() == before, "nobody is lost by a cut of 5 s"

    cut = machines.cut_pair(1, 2)
    machines.touch(1, 2)
    one = job.wait_trained(1, cut, before)
    assert "cannot reach it" in job.log()
    told(f"a pair was cut, and host {job.trainers()} went on alone", cut, one)
    machines.mend_pair(1, 2)
    mended = time.time()
    two = job.wait_trained(2, mended, one["generation"])
    told("the pair was mended", mended, two)
    clean(job)


def test_a_node_that_is_cut_off_comes_back_and_never_trains_beside_the_others(started):
    machines, job = started(2, 1)
    before = job.generation()
    machines.isolate(2)
    time.sleep(5.0)
    mended = machines.heal(2)
    print(f"a node was cut off for 5 s: the next step {job.wait_step_after(mended)['time'] - mended:.1f} s after that")
    job.settle()
    assert job.generation() == before, "nobody is lost by a cut of 5 s"

    for length_s in (30.0, NODE_DEAD_S):
        before = job.generation()
        machines.touch(2)
        cut = machines.isolate(2)
        time.sleep(length_s)
        mended = machines.heal(2)
        one = job.wait_trained(1, cut, before)
        told(f"a node was cut off for {length_s:g} s", cut, one)
        if length_s == NODE_DEAD_S:
            given_up = machines.wait_node(2, alive=False, since=cut)
            print(f"Ray gave it up after {given_up['time'] - cut:.1f} s: {given_up['why']}")
            machines.wait_gone(2)  # Ray ends there when it hears that its head has given it up
            print(f"its Ray ended {time.time() - mended:.1f} s after the mending")
            machines.readdress(2, "10.84.0.77")
            mended = machines.join(2)
            machines.wait_node(2, alive=True, since=mended)
        two = job.wait_trained(2, mended, one["generation"])
        told("the node was back" + (", with another address" if length_s == NODE_DEAD_S else ""), mended, two)
        assert not [node for node in machines.nodes() if not node["alive"]] or length_s == NODE_DEAD_S
        job.settle()
    clean(job)


def test_a_head_that_is_cut_off_ends_no_history(started):
    """The membership is there, and Ray's head: the workers train on under their leases, and then wait."""
    machines, job = started(2, 1)
    machines.touch(1, 2)
    before = job.generation()
    cut = machines.isolate(HEAD)
    time.sleep(30.0)
    assert job.commits()[-1]["time"] - cut > 12.0, "the workers reach each other, and hold leases"
    mended = machines.heal(HEAD)
    print(
        f"the head was cut off for 30 s: the next step {job.wait_step_after(mended)['time'] - mended:.1f} s after that"
    )
    job.settle()
    assert job.generation() == before

    cut = machines.isolate(HEAD)
    time.sleep(NODE_DEAD_S)
    last_s = job.commits()[-1]["time"] - cut
    print(f"the head was cut off for {NODE_DEAD_S:g} s: the last step {last_s:.1f} s after the cut")
    mended = machines.heal(HEAD)
    for host in (1, 2):
        machines.wait_gone(host)
    for host in (1, 2):
        machines.wait_node(host, alive=True, since=machines.join(host))
    two = job.wait_trained(2, mended, before)
    told("Ray had given both nodes up, and they were started again", mended, two)
    clean(job)
