"""Nodes that die and nodes that come: the job shrinks, waits, and grows past the size that it began with."""

import time

import pytest

from tests.workers.elastic.conftest import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

PLACE = "place_for_a_worker"


def test_a_dead_node_costs_its_worker_and_new_nodes_are_filled_as_they_come(job, own_ray):
    for name in ("a", "b"):
        own_ray.ask("add_node", name, num_cpus=1, resources={PLACE: 1})
    nodes = {"a", "b"}
    try:
        life = job(min=1, max=2, resources={PLACE: 1})
        life.drive()
        first = life.wait_training(2)

        killed = time.time()
        own_ray.ask("kill_node", "b")
        nodes.discard("b")
        (survivor,) = life.wait_training(1, since=killed).items()
        assert survivor in first.items()
        until(
            lambda: sorted(life.groups().values()) == ["CREATED", "PENDING"], lambda: f"{life.groups()} {life.tail()}"
        )
        print(f"trains alone and waits {time.time() - killed:.1f} s after the node's death")
        added = time.time()
        own_ray.ask("add_node", "c", num_cpus=1, resources={PLACE: 1})
        nodes.add("c")
        second = life.wait_training(2, since=added)
        print(f"two again {time.time() - added:.1f} s after a node came")
        assert survivor in second.items()

        life.membership("set_limits", 1, 3)
        until(lambda: len(life.groups()) == 3, lambda: str(life.groups()), 20)
        added = time.time()
        own_ray.ask("add_node", "d", num_cpus=1, resources={PLACE: 1})
        nodes.add("d")
        third = life.wait_training(3, since=added)
        print(f"three {time.time() - added:.1f} s after a node came")
        assert second.items() < third.items()
        assert life.longest_pause_s(survivor[0], killed, survivor[1]) < 3.0

        drained = time.time()
        own_ray.ask("drain_node", "c")
        two = life.wait_training(2, since=drained)
        print(f"a drained node's worker left after {time.time() - drained:.1f} s")
        assert two.items() < third.items()
        until(lambda: sorted(life.groups().values()) == ["CREATED"] * 2 + ["PENDING"], lambda: str(life.groups()))

        assert life.stop() == 0, life.tail()
        life.nothing_is_left()
    finally:
        for name in nodes:
            own_ray.ask("kill_node", name)
