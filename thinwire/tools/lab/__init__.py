"""A lab in a box: hosts joined by shaped links, as network namespaces of one Linux machine. See docs/lab.md."""

from thinwire.tools.lab.counters import HostCounters, difference
from thinwire.tools.lab.lab import Lab
from thinwire.tools.lab.run import Line, RunResult
from thinwire.tools.lab.spec import LabError, LabRunFailed, LabSpec

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
