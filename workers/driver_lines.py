"""What the processes of a job write, as Ray hands it to the job's driver, with a log of JSON: one object a line.

Ray would put `(ElasticWorker pid=16469, ip=10.0.0.2)` before each line, which then is JSON no more. What a worker has
logged goes on with the same fields; what a script or a library has printed becomes an object of its own, with the rank
of the process that wrote it, known from that one's own lines.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from thinwire.contract.logs import as_line, iso

HANDLER = "ray_print_logs"
"""What Ray calls its own, in whose place this one comes, and which it removes by that name at the end."""


class DriverLines:
    """Takes what Ray hands over, and prints it. fields: of each line that is made here."""

    def __init__(self, fields: Mapping[str, object], out: TextIO | None = None) -> None:
        self._fields, self._out = fields, out
        self._ranks: dict[tuple[object, object], object] = {}
        self._lock = threading.Lock()

    def take_over(self) -> None:
        """Print in place of Ray, which is up."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        dispatcher.remove_handler(HANDLER)
        dispatcher.add_handler(HANDLER, self)

    def __call__(self, batch: Mapping[str, Any]) -> None:
        """Lines of one process: pid, ip, is_err, lines; actor_name or task_name where Ray knows it."""
        with self._lock:
            text = "".join(self._line(batch, str(line)) + "\n" for line in batch.get("lines", ()))
            print(text, end="", file=self._out or sys.stdout, flush=True)

    def _line(self, batch: Mapping[str, Any], line: str) -> str:
        process = batch.get("pid"), batch.get("ip")
        found = _object(line)
        if found is not None:
            if "rank" in found:
                self._ranks[process] = found["rank"]
            # A script may print what looks like one: it is of this job all the same, and written as lines are.
            ours = found.get("job_id") == self._fields.get("job_id")
            return as_line(found if ours else {**found, **self._fields})
        is_error = bool(batch.get("is_err"))
        return as_line(
            {
                "time": iso(time.time()),
                "level": "WARNING" if is_error else "INFO",
                "logger": "stderr" if is_error else "stdout",
                "message": line,
                **self._fields,
                "rank": self._ranks.get(process),
                "process": batch.get("actor_name") or batch.get("task_name"),
                "pid": process[0],
                "node": process[1],
            }
        )


def _object(line: str) -> dict[str, Any] | None:
    """A line of a log of ours; None for any other, whatever a script prints."""
    if not line.startswith('{"time": "'):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and {"level", "logger"} <= found.keys() else None
