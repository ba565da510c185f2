"""Results with times that are easy to reckon with."""

from benchmarks.wire.cases import LOADS, Case, Network
from benchmarks.wire.methods import COMPUTE
from benchmarks.wire.phases import PHASES
from benchmarks.wire.results import Measured, Result, Sitting, Turn, settings_of

PARAMETERS = 1_000_000


def a_case(load="gpt-10m", hosts=2, rate=1000, methods=("ddp_fp32", "onebit_adam"), **changes):
    return Case(LOADS[load], Network(hosts, rate), tuple(methods), **changes)


def measured(step_s, steps=1, sent=1000, turns=3, overlap=False, **phases):
    return Measured(
        overlap=overlap,
        replicas_equal=True,
        finite=True,
        turns=[
            Turn(
                round=number,
                steps=steps,
                rank_s=[0.5 * step_s * steps, step_s * steps],
                step_s=[step_s] * steps,
                phases={phase: phases.get(phase, 0.0) * steps for phase in PHASES},
                sent_bytes=[sent * steps, sent * steps],
                frame_bytes=[sent * steps + 10, sent * steps + 20] if number < 2 else None,
            )
            for number in range(turns)
        ],
    )


def made_up(case, seconds, failed=None, compute_s=0.01):
    """seconds: a step's by method, or a Measured."""
    found = {name: value if isinstance(value, Measured) else measured(value) for name, value in seconds.items()}
    found[COMPUTE] = measured(compute_s, sent=0, forward=0.3 * compute_s, backward=0.7 * compute_s)
    return Result(
        load=case.load.name,
        hosts=case.network.hosts,
        rate_mbit=case.network.rate_mbit,
        settings=settings_of(case),
        parameters=PARAMETERS,
        sittings=[Sitting(measured=found, failed=failed or {})],
        net={"kind": "made up"},
        copy_bytes_s=10e9,
        load_average=[0.0, 0.0, 0.0],
        command="thinwire bench lab",
        commit="0" * 40,
        versions={"torch": "2"},
        hardware={"cpu": "none"},
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=1.0,
    )
