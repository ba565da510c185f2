"""Run seeds: `--seed N` prints the timeline of one, `--seeds A-B` those that break a law."""

from __future__ import annotations

import argparse
import sys
import time

from tests.workers.membership.simulator.job import Job
from tests.workers.membership.simulator.old_rules import OLD_RULES
from tests.workers.membership.simulator.timeline import written


def main() -> int:
    """1 where a law was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.workers.membership.simulator", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="print what happens in this run")
    which.add_argument("--seeds", metavar="A-B", help="print the runs of these that break a law")
    parser.add_argument("--verbose", action="store_true", help="all events, not the last ones")
    parser.add_argument("--old", choices=sorted(OLD_RULES), default="none", help="put an old rule back")
    given = parser.parse_args()
    low, _, high = (given.seeds or f"{given.seed}-{given.seed}").partition("-")
    began, broken = time.process_time(), 0
    for seed in range(int(low), int(high) + 1):
        job = Job(seed, OLD_RULES[given.old])
        law = job.run()
        broken += law is not None
        if law is not None or given.seed is not None:
            print(written(seed, job.timeline, law, None if given.verbose else 60), flush=True)
    print(f"{broken} of {int(high) - int(low) + 1} runs broke a law; {time.process_time() - began:.1f} s of CPU")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
