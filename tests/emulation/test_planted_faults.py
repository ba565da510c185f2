"""Faults planted in the kernels are found, each by the check that is there for it."""

import re

import pytest
import torch

from tests.comm.kernels.cases import WEIGHT, Case, assert_same, run
from tests.emulation.emulator import Emulator, KernelFault, require_compiler
from tests.emulation.planted import ALWAYS, FAULTS
from thinwire.comm.kernels.added import Lerp
from thinwire.comm.kernels.cuda import kernels as cuda
from thinwire.comm.kernels.cuda.kernels import CudaKernels
from thinwire.comm.kernels.fused_reference import PLAIN

SIZES = [8, 72, 1024, 1000, 2056, 120]
DEAD = [5, 77, 1100, 1101]


@pytest.fixture(autouse=True)
def _compiler():
    require_compiler()


def lerp_of_parts(kernels, case):
    """encode_lerp of gradients that are not aligned, and of bfloat16."""
    case = case.clone()
    x, ends = case.slice("x"), [80, 2104]
    first, second, third = x.tensor_split(ends)
    shifted = torch.zeros(first.numel() + 1)[1:].copy_(first)
    parts = [shifted, second.bfloat16(), third.clone()]
    z = Lerp(parts, WEIGHT, case.wire("last"))
    kernels.encode(case.slice("c"), case.scale(), z, case.table, case.wire("out"))
    kernels.flag(case.table, case.wire("out"))
    return case


def what_is_found(source, kernel):
    """What is said of this source, by the first order of lanes that shows something."""
    kernel, _, narrow = kernel.partition(", ")
    do = lerp_of_parts if kernel == "encode_lerp" else lambda kernels, case: run(kernels, kernel.split(" ")[0], case)
    for seed in range(4):
        case = Case(
            SIZES,
            DEAD,
            num_rows=7 if "many" in kernel else 3,
            sums=torch.bfloat16 if narrow else None,
            cuts=(2, 4),
            seed=seed,
        )
        for name in ("c", "x"):  # no value so large that its square is all of a sum
            case.slice(name).clamp_(-8, 8)
        case.slice("x")[1200] = case.poisonous("huge")
        try:
            assert_same(do(CudaKernels(Emulator(source, seed, resident=3)), case), do(PLAIN, case))
        except (KernelFault, AssertionError) as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "kernel", ["encode_sum", "encode_sum, narrow", "encode_lerp", "encode_scaled", "serve", "decode"]
)
def test_nothing_is_found_where_no_fault_is_planted(kernel):
    assert what_is_found(cuda.source(), kernel) == "nothing"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=() if f.name in ALWAYS else pytest.mark.slow) for f in FAULTS]
)
def test_a_planted_fault_is_found(fault):
    found = what_is_found(fault.planted_in(cuda.source()), fault.kernel)
    print(found.splitlines()[0])
    assert re.search(fault.found, found)
