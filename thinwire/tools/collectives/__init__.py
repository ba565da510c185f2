"""What collectives take on a network, by algorithm and size: `thinwire bench collectives` (docs/plan.md).

asked.py       what is to be measured; without torch, for the command line
run.py         where: hosts of a lab that it starts, or the ranks that this process is one of
rank.py        one rank of a lab
measure.py     turns of every algorithm at every size, and the line that is fitted to them
algorithms.py  the algorithms: what the product has, and the binomial tree
"""
