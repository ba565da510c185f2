"""What only a GPU can show, in one command and ten minutes: `python -m benchmarks.gpu`, or `make bench-gpu`.

run        which parts there are, and what a budget of minutes leaves of them
clock      times by events of the device; on a rehearsal by the wall clock
kernels    each kernel against a copy of the device's memory
steps      whole steps: ours, torch's fused Adam, DeepSpeed's chain (chain); counted and timed on the host too
nccl       collectives as an exchange has them
echo       one rank of several whose peers give what it does, so that one GPU does one rank's work
report     the result file and the table
"""
