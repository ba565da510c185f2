"""A rank that others wait for has compiled every loop before."""

import torch

from thinwire.optim.kernels.compiled import compile_all


def test_compiling_all_leaves_no_loop_of_the_folder_out():
    from thinwire.optim.kernels import lamb_loops, loops

    compile_all(torch.float32)
    compile_all(torch.bfloat16)
    of_folder = [
        f
        for module in (loops, lamb_loops)
        for f in vars(module).values()
        if hasattr(f, "nopython_signatures") and f.__module__ == module.__name__
    ]
    assert len(of_folder) == 13 + 9
    before = [len(f.nopython_signatures) for f in of_folder]
    assert min(before) >= 1
    compile_all(torch.float32)
    assert [len(f.nopython_signatures) for f in of_folder] == before
