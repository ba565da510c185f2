"""How the members of a generation become a process group, and what ends an attempt at once.

pairs.py   every member asks every other at its door, before a group is begun: can each pair talk, in both directions?
group.py   the attempt, over a store, gloo or NCCL, in threads that nobody has to wait for; the end of a group; the
           ranks of an elastic job, generation by generation
reach.py   a worker that waits for a peer asks whether it can still be reached
"""
