"""How the members of a generation become a process group, and what ends an attempt at once.

door.py       where a worker waits for its peers, and how each proves that it is one
pairs.py      every member asks every other, before a group is begun: can each pair talk, in both directions?
transport.py  gloo and NCCL connect in a thread that nobody has to wait for
group.py      the attempt: pairs, store, process group; and how a group is let go of
reach.py      who waits for a peer asks whether it can still be reached
detector.py   who of a group is gone, as the membership says
"""
