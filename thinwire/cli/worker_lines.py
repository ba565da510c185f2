"""The lines of one worker in a job's log, for `thinwire logs --rank`.

Ray puts the process before each line, `(ElasticWorker pid=16469, ip=10.0.0.2)`, and a worker's process says once which
worker it is: `worker_started number=1 pid=16469`. So nothing else has to be asked for or sent, and a worker that
replaces another is found too.
"""

from __future__ import annotations

import re
from collections import deque

HELD_LINES = 1000
"""Of a process that has not yet said which worker it is, the newest."""
_PROCESS = re.compile(r"(?:\x1b\[\d+m)*(\([^()]*\bpid=(\d+)[^()]*\))")
_IS_WORKER = re.compile(r"\bworker_started number=(\d+) pid=(\d+)\b")


class WorkerLines:
    """Takes a log in parts that may end anywhere, and gives the lines of one worker."""

    def __init__(self, number: int) -> None:
        self._number, self._rest = number, ""
        self._number_of: dict[str, int] = {}
        self._held: dict[str, deque[str]] = {}

    @property
    def workers(self) -> list[int]:
        """Who has said so far that it is a worker."""
        return sorted(set(self._number_of.values()))

    def of(self, text: str) -> str:
        """The worker's lines that are whole with this part."""
        *lines, self._rest = (self._rest + text).split("\n")
        return "".join(found for line in lines for found in self._take(line + "\n"))

    def end(self) -> str:
        """A last line that has no end."""
        rest, self._rest = self._rest, ""
        return "".join(self._take(rest))

    def _take(self, line: str) -> list[str]:
        process = _PROCESS.match(line)
        if process is None:
            return []
        name, pid = process.groups()
        said = _IS_WORKER.search(line)
        if said is not None and said[2] == pid:
            self._number_of[name] = int(said[1])
            return [*self._held.pop(name, ()), line] if int(said[1]) == self._number else []
        if name not in self._number_of:
            self._held.setdefault(name, deque(maxlen=HELD_LINES)).append(line)
            return []
        return [line] if self._number_of[name] == self._number else []
