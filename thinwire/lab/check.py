"""What can this machine do as a lab, and how near does it come to what is asked?"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable

from thinwire.lab import network
from thinwire.lab.errors import LabError
from thinwire.lab.goodput import MOST_OF_RATE, PATTERNS, measure
from thinwire.lab.lab import Lab, require_machine
from thinwire.lab.spec import LabSpec

BUSY_LOAD = 0.5


def check_machine(spec: LabSpec, seconds: float, say: Callable[[str], object]) -> bool:
    """Say line by line what is there and what the hosts of this spec reach; False where a lab cannot be made.

    seconds: time to send, for each pattern. Raises: LabRunFailed where the measurement itself fails.
    """
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    say(f"machine       Linux {platform.release()}, {cores} cores, load {load:.1f}")
    try:
        require_machine()
        say(f"root, tools   yes: {', '.join(network.tool(name) for name in ('ip', 'tc', 'bridge'))}")
    except LabError as error:
        say(f"root, tools   no: {error}")
        return False
    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(spec))
        except LabError as error:
            say(f"a lab         no: {error}")
            return False
        say("a lab         yes: namespaces, veth, bridge, token bucket (sch_tbf)")
        if network.has_netem(lab.holder):
            say("loss, delay   yes, exact: netem (sch_netem)")
        else:
            say("loss          no: this kernel has no netem. " + network.kernel_module_hint("sch_netem"))
            say("delay         by the receiver's NAPI timer: round trip of twice the delay + 0.07 ms, with jitter")
        for pattern in PATTERNS:
            found = measure(lab, pattern, seconds)
            reached = ", ".join(f"{rate:.1f}" for rate in found.received_mbit)
            direction = "one way" if pattern == "one-way" else "both ways"
            say(
                f"{direction:13} asked {spec.rate_mbit:g} Mbit/s, reached {reached} = {found.least_share:.3f} of it "
                f"(most possible: {MOST_OF_RATE:.3f}); round trip {found.round_trip_ms:.3f} ms"
            )
    if load > BUSY_LOAD * cores:
        say(f"The machine was busy (load {load:.1f} on {cores} cores): these rates may be its own, not the links'.")
    return True
