"""A rehearsal that nobody had: round figures."""

from thinwire.comm.wire.step_time import Transport
from thinwire.contract.plan import Link
from thinwire.workers.plan.asked import job_of_recipe
from thinwire.workers.plan.forecast import forecast
from thinwire.workers.plan.ways import Busy, Rehearsed

MILLION = 1_000_000
SLOW = Link(1e-4, 12.5e6, "100 Mbit/s")
FAST = Link(1e-5, 12.5e9, "100 Gbit/s")


def rehearsed(**changes) -> Rehearsed:
    """25 million parameters, 0.2 s of forward and backward, kernels of 30 ms; one core, nothing hidden."""
    busy = {
        "onebit_adam": Busy(0.25, 0.23),
        "onebit_lamb": Busy(0.26, 0.25),
        "zero_one_adam": Busy(0.25, 0.26, 0.22),
        "onebit_muon": Busy(0.31, 0.3),
    }
    found = {
        "elements": 25 * MILLION,
        "forward_s": 0.08,
        "backward_s": 0.12,
        "update_s": 0.03,
        "cast_s": 0.01,
        "busy": busy,
        "transport": Transport(),
        "cores": 1.0,
        "device": "cpu",
    }
    found |= changes
    return Rehearsed(**{**found, "busy": {"local_steps": Busy(0.0, 0.26, 0.24), **found["busy"]}})


def plan(spec, link=SLOW, workers=2, per_machine=1, **changes):
    return forecast(job_of_recipe(spec), link, workers, per_machine, rehearsed(**changes))
