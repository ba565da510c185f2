"""What does it cost when workers die? A real job whose workers are killed at random, beside the same one undisturbed.

run.py       both jobs, one after the other, who is killed and when, and the figures
account.py   goodput, mean world size, seconds to regroup and to be whole again, what was lost; and the timeline
"""
