"""Updates of parameters and moments on NVIDIA's GPUs.

updates.cu    what runs there, bit for bit what optim/kernels/loops.py computes
lamb.cu       the same of optim/kernels/lamb_loops.py: 1-bit LAMB
launches      the same calls as of the loops: one launch for each
lamb          those of 1-bit LAMB
"""
