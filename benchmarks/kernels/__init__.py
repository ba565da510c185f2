"""The fused kernels against the rate at which the machine copies memory: `bench.run` measures."""
