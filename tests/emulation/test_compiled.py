"""What NVIDIA's compiler makes of the CUDA sources: they need nothing beside them, and round as they say."""

import pytest

from tests.conftest import missing
from tests.emulation.compiled import (
    ARCHITECTURES,
    BYTES,
    SOURCES,
    Missing,
    compiled,
    counted,
    inexact,
    instructions_an_element,
)

MOST_REGISTERS = {"exchange.cu": 48, "updates.cu": 64, "lamb.cu": 64, "int8.cu": 48}
"""Of a thread. A multiprocessor has 65536: 1280 and 1024 threads are there at once."""
MOST_INSTRUCTIONS = {
    "encode_sum": 34,
    "encode_sum_narrow": 41,
    "encode_lerp": 43,
    "encode_lerp_narrow": 53,
    "encode_scaled": 55,
    "encode_first_advanced": 41,
    "encode_advanced": 39,
    "serve": 44,
    "serve_narrow": 55,
    "decode": 12,
    "narrow_all": 19,
    "descend": 51,
    "descend_narrow": 52,
    "adam": 75,
    "local": 62,
    "propose": 14,
    "first_local": 53,
    "first_proposal": 11,
    "receive": 75,
    "receive_rows": 42,
    "measure_rows": 182,
    "measure_floats": 198,
    "sum_rows": 130,
    "sum_floats": 134,
    "measure_gradient": 97,
    "move_rows": 70,
    "move_floats": 66,
    "encode_rows": 29,
    "encode_left": 39,
    "serve_rows": 240,
    "decode_rows": 27,
}
"""For an element, of all threads: a tenth more than what was counted, on the architecture with most."""
HALF_AS_WIDE = {"encode_sum_narrow", "encode_lerp_narrow", "narrow_all"}
"""They read, or write, four bfloat16."""
NO_STORES, NO_LOADS = {"encode_rows"}, {"decode", "narrow_all", "decode_rows"}
"""Of four floats: they write bytes, or read bits, bytes, or another type."""
ALWAYS = "sm_90"


def made(name, architecture, how=compiled):
    try:
        return how(SOURCES[name](), architecture)
    except Missing as error:
        missing(str(error))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=() if one == ALWAYS else pytest.mark.slow) for one in ARCHITECTURES]
)
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_compiles_by_itself_within_its_bounds(name, architecture):
    """No header, no define; no float operation whose last bit is open; no memory of a thread's own; wide loads."""
    found, as_counted = made(name, architecture), made(name, architecture, counted)
    assert inexact(found.ptx) == set()
    for kernel in found.kernels.values():
        assert kernel.registers <= MOST_REGISTERS[name]
        assert (kernel.spilled_bytes, kernel.stack_bytes, kernel.shared_bytes) == (0, 0, 0)
        assert not [one for one in kernel.operations if one.startswith(("LDL", "STL"))]
        if kernel.name in BYTES:
            width = 64 if kernel.name in HALF_AS_WIDE else 128  # four numbers
            assert kernel.operations["STG.E.128"] + kernel.operations[f"STG.E.{width}"] >= 1 or kernel.name in NO_STORES
            assert kernel.operations[f"LDG.E.{width}"] >= 1 or kernel.name in NO_LOADS
            assert 1 < instructions_an_element(as_counted.kernels[kernel.name]) <= MOST_INSTRUCTIONS[kernel.name]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["a * b + c", "__fdividef(a, b)", "__fmaf_rn(a, b, c)", "sqrtf(a) / b"])
def test_a_result_that_the_standard_leaves_open_is_seen(operator):
    source = f'extern "C" __global__ void f(float* x) {{ float a = x[0], b = x[1], c = x[2]; x[3] = {operator}; }}'
    try:
        found = compiled(source.replace("--", ""), ALWAYS)
    except Missing as error:
        missing(str(error))
    exact = operator in ("a * b + c", "sqrtf(a) / b")  # with --fmad=false, and without --use_fast_math
    assert (inexact(found.ptx) == set()) == exact


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words():
    try:
        with pytest.raises(ValueError, match="undefined"):
            compiled('extern "C" __global__ void f(float* x) { x[0] = y; }', ALWAYS)
    except Missing as error:
        missing(str(error))
