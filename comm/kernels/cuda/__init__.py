"""The fused kernels of the exchange on NVIDIA's GPUs.

exchange.cu    what runs there; fused_reference says what it computes, to the last bit
int8.cu        the same of int8_reference
launch         what launches a kernel: a protocol, so that an emulator and CuPy run the same code above it
tables         the blocks and gradients that a kernel works on, as they lie in memory
kernels        the calls of fused_reference.Kernels: one launch for all blocks of a bucket
int8           rows of 8-bit values: one launch for all of a bucket
by_cupy        launches through CuPy, on torch's stream
"""
