"""Real jobs, disturbed: the cost of deaths, and whether a job keeps one history.

asked.py       what a drill is asked, and what it reports
job.py         a job of a drill, on a Ray of its own
run.py         the drill: workers are killed at random; then the same job undisturbed
               its figures: goodput, mean world size, seconds to regroup and to be whole again; and the timeline
chaos.py       the chaos drill: all kinds of faults, each step traced and compared; with root in a lab, a host for each
               worker, so that the network can be cut
faults.py      what is done to the job, and when
cuts.py        who is cut off from whom
verdict.py     what the traces prove or refute
survivors.py   whether processes that live long grow
"""
