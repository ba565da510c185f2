"""What encoding has left out: the loop is the plain reference bit for bit, in place or not."""

import pytest
import torch

from tests.comm.kernels.cases import Case
from thinwire.comm.kernels.kept import left_out_, left_out_in_torch_


def bits(x):
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[8], [64, 8, 40], [8] * 37, [4096, 4096, 16]])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), -0.0])
def test_the_loop_is_the_reference_bit_for_bit(dtype, sizes, special):
    case = Case(sizes, dead=[3, 5, sum(sizes) - 1], num_rows=1, dtype=dtype, seed=len(sizes))
    c_c, scale_b = case.slice("c"), case.scale()
    if special is not None:
        c_c[1] = special
    if special == float("inf"):
        scale_b[-1] = special
    due = left_out_in_torch_(c_c, scale_b, case.table, torch.empty_like(c_c))
    before = c_c.clone()
    around = {name: buffer.clone() for name, buffer in case.buffers.items()}
    assert torch.equal(bits(left_out_(c_c, scale_b, case.table, case.slice("out_c"))), bits(due))
    assert torch.equal(bits(c_c), bits(before))
    left_out_(c_c, scale_b, case.table, c_c)
    assert torch.equal(bits(c_c), bits(due))
    for name in ("c", "out_c"):  # nothing beside the slice
        case.slice(name).zero_()
        start = case.slice(name).storage_offset()
        around[name][start : start + case.numel] = 0
        assert torch.equal(bits(case.buffers[name]), bits(around[name]))


def test_sums_in_bfloat16_are_read_and_errors_are_written_in_float32():
    case = Case([64, 8, 40], dead=[3], num_rows=1, sums=torch.bfloat16)
    c_c, scale_b = case.slice("c"), case.scale()
    wide_c = c_c.to(torch.float32)
    assert torch.equal(
        left_out_(c_c, scale_b, case.table, torch.empty_like(wide_c)),
        left_out_(wide_c, scale_b, case.table, torch.empty_like(wide_c)),
    )
