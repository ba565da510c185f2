"""Prints what Ray's head thinks of its nodes, a JSON line a change.  python -m tests.workers.elastic.watch ADDRESS"""

import json
import sys
import time

from ray._raylet import GcsClient
from ray.exceptions import RpcError

EVERY_S = 0.25


def _client(address):
    while True:
        try:
            return GcsClient(address=address)
        except RpcError:  # it is not there yet
            time.sleep(EVERY_S)


def main():
    client = _client(sys.argv[1])
    known = {}
    while True:
        for node_id, node in client.get_all_node_info().items():
            alive = node.state == 0
            if known.get(node_id) != alive:
                known[node_id] = alive
                why = node.death_info.reason_message
                line = {"time": time.time(), "address": node.node_manager_address, "alive": alive, "why": why}
                print(json.dumps(line), flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
