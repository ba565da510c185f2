"""Updates of parameters and moments in one pass over memory, on CPUs and GPUs.

updates    for torch's vectors: by loops on a CPU, by the kernels of cuda/ on a GPU; `fits` says for which
loops      what is computed, compiled by numba
lamb       1-bit LAMB's compressed step, by lamb_loops or cuda/lamb.cu
"""
