"""A driver of an elastic job with a toy train function.  python -m tests.workers.elastic.drive JSON

Each worker appends a line to RUN_DIR/steps.jsonl every 0.05 s. They stop when RUN_DIR/stop exists.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path


def toy(config):
    import uuid

    import ray.util

    from thinwire.workers.elastic.worker_side import Failed, Left, lease_expired, resolve, slot_of
    from thinwire.workers.membership.member import Member
    from thinwire.workers.membership.seats import Identity, Standing

    run_dir, slot = Path(config["run_dir"]), slot_of(config)
    if (run_dir / f"die-{slot}").exists():
        os._exit(3)
    if (run_dir / f"raise-{slot}").exists():
        raise ValueError(f"slot {slot} was told to raise")
    started = time.time()
    identity = Identity(id=uuid.uuid4().hex, slot=slot, host=ray.util.get_node_ip_address(), pid=os.getpid())
    member = Member(lambda: resolve(config), config["elastic"]["secret"], identity)
    step, generation, rank = 0, None, None
    path = run_dir / "steps.jsonl"

    def say(what, **fields):
        line = {"what": what, "time": time.time(), "pid": os.getpid(), "slot": slot, "step": step, **fields}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    say("started", began=started)
    while True:
        seat = member.join(Standing(generation=generation, rank=rank, step=step, has_state=step > 0))
        generation, rank = seat.generation, seat.rank
        member.formed()
        step = max(seated.standing.step for seated in seat.members)
        while member.over is None:
            time.sleep(0.05)
            step += 1
            say("step", generation=generation, size=seat.size)
            if (run_dir / f"fail-{slot}").exists():
                member.fail("it was told to")
                say("failed")
                return Failed("OSError", f"slot {slot} was told to fail", step, generation)
            if lease_expired.is_set():
                say("lease")
                return None
            if (run_dir / "stop").exists():
                member.finish()
                say("done")
                return step
            change = member.at_boundary(step)
            if change is not None:
                if change.leaving:
                    member.finish()
                    say("left")
                    return Left(change.reason)
                break


def main():
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    import ray
    from ray.train import FailureConfig, RunConfig

    from thinwire.workers.elastic.trainer import ElasticTrainer
    from thinwire.workers.membership.seats import Limits

    ray.init(address=options["address"], log_to_driver=True)
    result = ElasticTrainer(
        toy,
        train_loop_config={"run_dir": options["run_dir"]},
        job=options["job"],
        secret="a secret of sixteen characters or more",
        limits=Limits(options["min"], options["max"]),
        resources_per_worker={"CPU": 1, **options.get("resources", {})},
        use_gpu=False,
        run_config=RunConfig(
            name=options["job"],
            storage_path=options["run_dir"] + "/ray",
            failure_config=FailureConfig(max_failures=options.get("max_failures", 0)),
        ),
        lease_s=options.get("lease_s", 60.0),
        **options.get("patience", {}),
    ).fit()
    print("RESULT", result.return_value, flush=True)


if __name__ == "__main__":
    main()
