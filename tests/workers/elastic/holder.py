"""A Ray of its own, with nodes to add and to kill, and questions to ask.  python -m tests.workers.elastic.holder

One JSON request a line on stdin, [name, arguments]; one JSON answer a line on stdout. The end of stdin ends all.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

import ray
from ray._private.state import actors
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group_table

from thinwire.service.launch import start_hook
from thinwire.workers.elastic.plan import NAMESPACE


def patient(**arguments):
    """Of a node that bears agents which start slowly, where other work holds the cores."""
    given = SimpleNamespace()
    start_hook.patient(given, False)
    return {**arguments, **vars(given)}


class Holder:
    def __init__(self, num_cpus):
        head = patient(num_cpus=num_cpus, include_dashboard=False)
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.nodes = {}

    def address(self):
        return self.cluster.address

    def add_node(self, name, **arguments):
        self.nodes[name] = self.cluster.add_node(**patient(**arguments))

    def kill_node(self, name):
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def drain_node(self, name):
        """As when a spot node is about to be taken away."""
        GcsClient(address=self.cluster.address).drain_node(
            self.nodes[name]._node_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            "a test",
            int((time.time() + 600) * 1000),
        )

    def actors(self, job):
        """Of this job that live: name -> pid."""
        return {
            actor["Name"]: actor["Pid"]
            for actor in actors().values()
            if actor["Name"].startswith(f"{job}/") and actor["State"] != "DEAD"
        }

    def groups(self, job):
        """Placement groups of this job that are there: name -> state."""
        return {
            entry["name"]: entry["state"]
            for entry in placement_group_table().values()
            if entry["name"].startswith(f"{job}/") and entry["state"] != "REMOVED"
        }

    def membership(self, job, method, *arguments):
        until = time.monotonic() + 30
        while True:
            try:
                handle = ray.get_actor(f"{job}/membership", namespace=NAMESPACE)
                return ray.get(getattr(handle, method).remote(*arguments), timeout=30)
            except RayActorError:  # it is being restarted
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    holder = Holder(int(sys.argv[1]))
    for line in sys.stdin:
        name, arguments, keywords = json.loads(line)
        began = time.time()
        try:
            answer = {"answer": getattr(holder, name)(*arguments, **keywords)}
        except Exception as error:  # noqa: BLE001 - told to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["took_s"] = time.time() - began
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    ray.shutdown()
    holder.cluster.shutdown()


if __name__ == "__main__":
    main()
