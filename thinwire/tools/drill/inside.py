"""The chaos drill inside its lab, on the head's host.  python -m thinwire.tools.drill.inside WHAT

WHAT: the fields of Chaos and the addresses of all hosts, as JSON. Speaks with hosts.py: a JSON object a line on stdout,
and for those that ask for something a line on stdin when it is done. What is printed otherwise goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from thinwire.tools.drill.asked import Chaos, DrillFailed
from thinwire.tools.drill.chaos import disturb_and_judge
from thinwire.tools.drill.cuts import HEAD, Direction
from thinwire.tools.drill.job import START_S, own_ray


class Outside:
    """The owner of the lab. Any thread may call. The network of the drill."""

    def __init__(self, tell: TextIO, hear: TextIO, addresses: Sequence[str]) -> None:
        self._tell, self._hear, self._addresses = tell, hear, list(addresses)
        self._lock = threading.Lock()

    def number_of(self, address: str) -> int:
        """The host that has this address."""
        return self._addresses.index(address)

    def deliver(self, directions: Collection[Direction], *, arrives: bool) -> None:
        """Cut these directions, or mend them. Raises: DrillFailed where nobody does it."""
        with self._lock:
            self._write(deliver=sorted(directions), arrives=arrives)
            if not self._hear.readline():
                raise DrillFailed("the owner of the lab is gone: look at what it said")

    def say(self, words: str, done: float) -> None:
        """To the person who waits for the drill."""
        self.tell(say=[words, done])

    def tell(self, **words: Any) -> None:
        """Something that has no answer."""
        with self._lock:
            self._write(**words)

    def _write(self, **words: Any) -> None:
        self._tell.write(json.dumps(words) + "\n")
        self._tell.flush()


def main() -> None:
    """See the module."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    fields = json.loads(sys.argv[1])
    addresses = fields.pop("addresses")
    paths = {name: Path(fields[name]) for name in ("out", "beside") if fields[name] is not None}
    chaos = Chaos(**{**fields, **paths})
    outside = Outside(os.fdopen(os.dup(1), "w"), sys.stdin, addresses)
    os.dup2(2, 1)
    try:
        with own_ray(0, addresses[HEAD]) as address:
            for host in range(HEAD + 1, len(addresses)):  # one by one: each takes all of a core to start
                outside.tell(join=host, head=address)
                _wait_for_nodes(host + 1)
            found, faults = disturb_and_judge(chaos, outside.say, address, outside)
    except DrillFailed as error:
        outside.tell(failed=str(error))
    else:
        outside.tell(found=asdict(found), faults=faults)


def _wait_for_nodes(number: int) -> None:
    import ray

    until = time.monotonic() + START_S
    while sum(node["Alive"] for node in ray.nodes()) < number:
        if time.monotonic() > until:
            raise DrillFailed(
                f"fewer than {number} nodes of Ray in {START_S:g} s: see hosts/*.log in the drill's folder"
            )
        time.sleep(0.2)


if __name__ == "__main__":
    main()
