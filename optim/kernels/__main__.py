"""Compile all loops for both types into numba's cache: python -m thinwire.optim.kernels"""

from thinwire.comm.kernels.choose import CPU_DTYPES
from thinwire.optim.kernels.compiled import compile_all

for dtype in CPU_DTYPES:
    compile_all(dtype)
