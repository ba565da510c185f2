"""Updates of parameters and moments on NVIDIA's GPUs.

updates.cu    what runs there, bit for bit what optim/kernels/loops.py computes
launches      the same calls as of the loops: one launch for each
"""
