"""How the members of a generation become a process group, and what ends an attempt at once.

pairs.py   can each pair of members talk, in both directions: proved at their doors before a group is begun, and asked
           again by a worker that waits for a peer
group.py   the attempt, over a store, gloo or NCCL, in threads that nobody has to wait for; the end of a group; the
           ranks of an elastic job, generation by generation
"""
