"""What does it cost when workers die? A real job whose workers are killed at random, beside the same one undisturbed.

job.py       one job: its folder, its driver, the Ray that it runs on
killer.py    who is killed, and when
account.py   goodput, mean world size, seconds to regroup and to be whole again, what was lost
picture.py   the timeline
run.py       both jobs, one after the other, and the figures
"""
