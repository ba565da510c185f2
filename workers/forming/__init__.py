"""How the members of a generation become a process group, and what ends an attempt at once.

door.py       where a worker waits for its peers, and how each proves that it is one
pairs.py      every member asks every other, before a group is begun: can each pair talk, in both directions?
group.py      the attempt: pairs, store, gloo or NCCL in threads that nobody has to wait for; and the end of a group
reach.py      who waits for a peer asks whether it can still be reached
detector.py   who of a group is gone, as the membership says
"""
