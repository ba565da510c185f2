"""Updates of parameters and moments on NVIDIA's GPUs; optim/kernels/updates.py and lamb.py launch them.

updates.cu    bit for bit what optim/kernels/loops.py computes
lamb.cu       the same of optim/kernels/lamb_loops.py: 1-bit LAMB
"""
