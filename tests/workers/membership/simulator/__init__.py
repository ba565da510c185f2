"""A simulator of the membership: the real rules and the real state of its members, in simulated time, under faults.

    clockwork.py    simulated time and chance; a seed replays exactly
    machines.py     machines with clocks, processes that are stopped and killed
    network.py      directions that are cut and healed, connections that end on each side at their own time
    server.py       the real Rules                        worker.py, link.py    the real State, and a training loop
    group.py        a process group, and its collectives  checkpoints.py        the store
    faults.py       what goes wrong                       laws.py               what must hold
    job.py          one run                               old_rules.py          rules that lose something

`python -m tests.workers.membership.simulator --seed N` prints what happened in the run of one seed, `--seeds A-B`
the runs of those that break a law.
"""
