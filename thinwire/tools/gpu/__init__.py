"""Whole training steps over NCCL with one GPU: its ranks are hosts of a lab, joined by links of a given rate.

cases     which methods, at which rates, in which order
model     the GPT that is trained, and its data
methods   each way to train it: DDP and its hooks, DeepSpeed, FSDP, ours
rank      one rank: takes the methods one after another, and says what a step of each took
run       the command: makes the hosts, starts the ranks, keeps what they say
table     the result file and its table

`thinwire bench gpu` and `python -m benchmarks.gpu_hosts` are the same command. It needs torch, an NVIDIA GPU, iproute2
and root, and neither Ray nor anything of the service.
"""
