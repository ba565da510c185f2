"""Seconds of a step over a given link, for each way to average gradients. The command: `thinwire bench lab`.

A case is a load on some hosts over one network; all methods run in one go of it, in turns, so that noise hits all
alike. The parts: cases.py (what is run), methods.py and its makers ddp.py, ours.py and chain.py (the methods), child.py
(a rank), measure.py (one case), results.py (its file), figures.py and limits.py (what follows from it), table.py,
pictures.py.
"""
