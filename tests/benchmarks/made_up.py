"""Results that nobody computed, for what is done with results."""

from benchmarks.convergence.results import Point, Result
from benchmarks.convergence.study import METHODS, RATES, case

STEPS = 20
PARAMETERS = 1000
RING = 6000  # bytes a step of four workers: 2 * 3/4 * 4 bytes a parameter


def made_up(method="adam", seed=0, loss=2.0, *, accuracy=None, task="gpt", diverged=None, **changes) -> Result:
    rate = RATES[task][METHODS[method].baseline or method]
    compressed = METHODS[method].baseline is not None
    steps = {"warmup": 5, "compressed": 15} if compressed else {"dense": STEPS}
    sent = {"warmup": 5 * RING, "compressed": 15 * RING // 30} if compressed else {"dense": STEPS * RING}
    fields = {
        "task": task,
        "method": method,
        "seed": seed,
        "spec": case(task, method, seed, STEPS, rate).spec.model_dump(mode="json"),
        "commit": "0" * 40,
        "versions": {"python": "3.11.0", "torch": "2.13.0"},
        "hardware": {"cpu": "made up", "cores": "2", "system": "none"},
        "finished_at": "2026-01-01T00:00:00+00:00",
        "parameters": PARAMETERS,
        "diverged": diverged,
        "training_losses": [(10, 3.0), (20, loss)],
        "validation": [
            Point(step=step, loss=5.0 - (5.0 - loss) * step / STEPS, accuracy=accuracy, sent_bytes=step * 100)
            for step in (0, 10, 20)
        ],
        "steps_by_phase": steps,
        "bytes_by_phase": sent,
        "final_sync_bytes": 0,
        "collectives": STEPS,
        "rounds": STEPS,
        "rounds_skipped": 0,
        "frozen_at": 5 if compressed else None,
        "warmup_ended_by": "rule" if compressed else None,
        "floored_elements": 10 if compressed else None,
        "replicas_bit_equal": True,
        "wall_s": 1.0,
        "cpu_s": 1.0,
    }
    return Result.model_validate({**fields, **changes})
