"""The model of a step (comm/wire/step_time.py) against the steps that benchmarks/results/wire has measured.

What a result file does not hold is taken from elsewhere, and nothing is fitted to its steps:

    forward, backward   alone, in turns with the methods, in the same file
    loops               bytes of memory by docs/speed.md, "Bytes of memory", at the copy rate in the same file
    hooks, transport    docs/speed.md, "Where the time goes": 10 ms for 102 parameters, 20 ms for 3.2 MB in one bit
    link                the rate that was asked for, less headers; the lab's delay

That of the transport for whole gradients was not measured on that machine, and counts as nothing. Each rank has one
core or half of one.
"""

from pathlib import Path

import pytest

from benchmarks.wire import results
from benchmarks.wire.cases import FULL_LOADS, GOODPUT, LOADS, NETWORKS, Case
from benchmarks.wire.figures import step_seconds
from benchmarks.wire.limits import ADAM, BITS, DESCEND, ENCODE, serve
from benchmarks.wire.loads import shapes
from benchmarks.wire.methods import COMPUTE
from tests.covering import every_value
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.wire import step_time
from thinwire.comm.wire.network import Network
from thinwire.comm.wire.step_time import Transport, Work, dense_16, dense_32, one_bit

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "wire"
CORES = 2
HOOK_S, TRANSPORT = 0.010 / 102, Transport(bits=0.020 / 3.21e6)
COPIED = 8.0
"""Bytes a value: a gradient that is brought into the flat vector."""
METHODS = (
    "ddp_fp32",
    "ddp_bf16",
    "onebit_adam",
    "onebit_lamb",
    "zero_one_adam_1",
    "zero_one_adam_4",
    "zero_one_adam_16",
)


def loop_bytes(method, ranks):
    """Bytes of memory a value in a step, a mean over the steps of a round."""
    sync = COPIED + 40.0 + 12.0 + BITS + serve(ranks)
    return {
        "ddp_fp32": ADAM,
        "ddp_bf16": ADAM + 12.0,
        "onebit_adam": ENCODE + serve(ranks) + DESCEND,
        "onebit_lamb": COPIED + 56.0 + 12.0 + BITS + serve(ranks) + 8.0,
    }.get(method) or ((int(method.split("_")[-1]) - 1) * (COPIED + 36.0) + sync) / int(method.split("_")[-1])


def predict(result, sitting, method):
    """Seconds of a step by the model."""
    ranks, numel = result.hosts, result.parameters
    network = Network(ranks, 1e-3 * result.net["delay_ms"], GOODPUT * result.rate_mbit * 1e6 / 8)
    cores = CORES / ranks
    hooks_s = 0.0 if method.startswith("ddp") else HOOK_S * len(shapes(LOADS[result.load])) * max(1.0, 1 / cores)
    loops_s = ranks * numel * loop_bytes(method, ranks) / result.copy_bytes_s
    work = Work(step_seconds(sitting.measured[COMPUTE]) + loops_s + hooks_s)
    if method.startswith("ddp"):
        send = dense_32 if method == "ddp_fp32" else dense_16
        return step_time.step_seconds(network, work, send(network, numel, TRANSPORT), cores)
    bucket = sitting.measured[method].bucket_elements or DEFAULT_BUCKET
    every = step_time.step_seconds(network, work, one_bit(network, numel, TRANSPORT, bucket), cores)
    if not method.startswith("zero_one"):
        return every
    interval = int(method.split("_")[-1])
    return work.busy_s + (every - work.busy_s) / interval


def errors():
    """Predicted over measured, less 1, by case and method; of each method its first sitting."""
    found = {}
    for load in FULL_LOADS:
        for network in NETWORKS:
            result = results.read(results.path_of(RESULTS, Case(LOADS[load], network, ())))
            for sitting in result.sittings:
                for method in METHODS:
                    if method in sitting.measured:
                        measured_s = step_seconds(sitting.measured[method])
                        found.setdefault((result.name, method), predict(result, sitting, method) / measured_s - 1)
    return found


def test_whole_gradients_and_1_bit_adam_are_within_15_percent_but_for_these():
    """Two ranks on a core, at 1 Gbit/s, is where the transport's own work shows; the model is given none for it."""
    misses = {key: round(100 * error) for key, error in errors().items() if abs(error) > 0.15 and key[1] in METHODS[:3]}
    assert misses == {
        ("exchange-25m/4x1Gbit", "ddp_fp32"): -22,
        ("gpt-25m/4x1Gbit", "ddp_fp32"): -22,
        ("exchange-25m/4x1Gbit", "ddp_bf16"): -31,
        ("gpt-25m/4x1Gbit", "ddp_bf16"): -18,
        ("gpt-10m/4x1Gbit", "ddp_bf16"): -18,
        ("exchange-25m/4x100Mbit", "onebit_adam"): -20,
        ("exchange-25m/4x1Gbit", "onebit_adam"): -22,
        ("gpt-25m/2x100Mbit", "onebit_adam"): 17,
        ("gpt-25m/4x1Gbit", "onebit_adam"): -16,
    }


@pytest.mark.few(1)
@every_value(
    {
        "method, within": [
            ("onebit_lamb", 0.28),
            ("zero_one_adam_1", 0.16),
            ("zero_one_adam_4", 0.28),
            ("zero_one_adam_16", 0.50),
        ]
    },
    only=(0, 2),
)
def test_the_others_are_as_far_off_as_counting_bytes_of_memory_is(method, within):
    """Loops that write in place are faster than a copy of as many bytes: most so in the local steps of 0/1 Adam."""
    found = [error for (_, name), error in errors().items() if name == method]
    assert len(found) == len(FULL_LOADS) * len(NETWORKS)
    assert max(map(abs, found)) <= within


def test_it_tells_where_1_bit_adam_pays():
    """It was faster than DDP in all of these cases, and the model says so of each."""
    for load in FULL_LOADS:
        for network in NETWORKS:
            result = results.read(results.path_of(RESULTS, Case(LOADS[load], network, ())))
            (adam,) = [sitting for sitting in result.sittings if "onebit_adam" in sitting.measured]
            dense = predict(result, adam, "ddp_fp32")
            assert dense > predict(result, adam, "onebit_adam")
            assert step_seconds(adam.measured["ddp_fp32"]) > step_seconds(adam.measured["onebit_adam"])
