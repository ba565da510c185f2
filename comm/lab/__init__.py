"""A lab in a box: hosts joined by shaped links, as network namespaces of one Linux machine. See docs/lab.md."""

from thinwire.comm.lab.counters import HostCounters, difference
from thinwire.comm.lab.errors import LabError, LabRunFailed
from thinwire.comm.lab.lab import Lab
from thinwire.comm.lab.run import Line, RunResult
from thinwire.comm.lab.spec import LabSpec

__all__ = [
    "HostCounters",
    "Lab",
    "LabError",
    "LabRunFailed",
    "LabSpec",
    "Line",
    "RunResult",
    "difference",
]
