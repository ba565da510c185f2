"""The kernels of lamb.cu, emulated, equal the compiled loops of LAMB and 1-bit LAMB bit for bit, sums too."""

import re
from dataclasses import replace

import pytest
import torch

from tests.comm.kernels.cases import assert_same_floats
from tests.emulation.emulator import Emulator, KernelFault, kernels_in, require_compiler
from tests.optim.kernels.test_lamb import BOUNDS, LENGTHS, Floats, Problem, Rows
from thinwire.comm.kernels.cuda.launch import THREADS
from thinwire.optim.kernels import lamb as cuda
from thinwire.optim.kernels.lamb import TILE, CudaLamb, CudaStep, CudaTiles, Descent, Heard, Step, Tiles

MEASURE = {"measure_rows", "measure_floats", "sum_rows", "sum_floats", "measure_gradient"}
KERNELS = MEASURE | {"rates_of", "trust_of", "move_rows", "move_floats"}


@pytest.fixture(autouse=True)
def _compiler():
    require_compiler()


def stepped(problem, now, before, launcher=None):
    """One step, by emulated kernels or by the loops: what is written, and the sums that it follows from."""
    count = len(problem.layout.live)
    p, fresh_v, r = problem.p.clone(), problem.fresh_v.clone(), problem.r.clone()
    heard = Heard(now, p, count), Heard(before, p, count)
    given = p, problem.v, fresh_v, problem.coeff, r, *heard, replace(BOUNDS, follows=problem.follow)
    descent = Descent(*given, room=0) if launcher is None else CudaLamb(launcher, *given)
    tiles = Tiles(problem.layout.live, p) if launcher is None else CudaTiles(problem.layout.live, p)
    descent.descend_(tiles, slice(0, count), problem.h)
    sums = torch.as_tensor(tiles.found).view(4, -1)[1:]
    return {"p": p, "fresh_v": fresh_v, "factor": r, "sums": sums, "rates": torch.as_tensor(tiles.rates)}


def kinds_of(problem):
    """Momenta of now and before: both in rows, both in floats, the one before as it was in a warm-up."""
    rows, floats = ((problem.said(kind, 0), problem.said(kind, 1)) for kind in (Rows, Floats))
    momentum_N = torch.empty_like(problem.p)
    rows[1].decode_(momentum_N)
    return {"rows": rows, "floats": floats, "rows after floats": (rows[0], momentum_N)}


def assert_equal(ours, theirs):
    for name, a in ours.items():
        assert_same_floats(a, theirs[name], name)


@pytest.mark.few(3)
@pytest.mark.law
@pytest.mark.parametrize("kind", ["rows", "floats", "rows after floats"])
@pytest.mark.parametrize(
    ("lengths", "decay", "follow"),
    [
        (LENGTHS[0], 0.0, False),
        (LENGTHS[1], 0.1, True),
        ((TILE + 17, 1), 0.1, False),
        pytest.param(LENGTHS[2], 0.1, False, marks=pytest.mark.slow),
        pytest.param(LENGTHS[2], 0.0, True, marks=pytest.mark.slow),
        pytest.param((300 * TILE + 5, 1000), 0.1, False, marks=pytest.mark.slow),
    ],
)
def test_a_step_equals_that_of_the_compiled_loops_bit_for_bit(lengths, decay, follow, kind):
    problem = Problem(lengths, torch.float32, decay, follow=follow)
    said = kinds_of(problem)[kind]
    launcher = Emulator(cuda.source(), seed=3, resident=3)
    assert_equal(stepped(problem, *said, launcher), stepped(problem, *said))
    last = "floats" if kind == "floats" else "rows"
    found = f"{'sum' if follow else 'measure'}_{'rows' if kind == 'rows' else 'floats'}"
    assert launcher.launched == [found, "rates_of", f"move_{last}"]


@pytest.mark.parametrize("kind", ["rows", "floats"])
def test_what_is_no_number_or_infinite_is_that_of_the_loops(kind):
    problem = Problem((1000, 5, 64, 9), torch.float32, 0.1)
    problem.v[3], problem.p[70], problem.fresh_v[500] = torch.nan, torch.inf, torch.nan
    problem.v[1008:1072], problem.fresh_v[1072:1081] = torch.inf, torch.inf  # all of a tensor
    said = kinds_of(problem)[kind]
    assert_equal(stepped(problem, *said, Emulator(cuda.source(), seed=1)), stepped(problem, *said))


def test_vectors_that_are_not_aligned_or_of_another_type_are_refused_before_anything_is_launched():
    problem, launcher = Problem((64,), torch.float32, 0.1), Emulator(cuda.source())
    said = kinds_of(problem)["rows"]
    problem.v = torch.zeros(65)[1:]
    with pytest.raises(ValueError, match="multiples of 16"):
        stepped(problem, *said, launcher)
    problem.v = torch.zeros(64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"torch.float64\[64\] .* must be contiguous torch.float32"):
        stepped(problem, *said, launcher)
    assert launcher.launched == []


FAULTS = {
    "no barrier before squares are added up": (
        "put_four(squares, j * ROOM + inside, of[j]);\n        }\n        __syncthreads();",
        "put_four(squares, j * ROOM + inside, of[j]);\n        }\n",
        "in a race|nobody has written",
    ),
    "one place for the squares of all slabs": ("turn ^= 1u", "turn = 0u", "in a race"),
    "another order of a sum": ("half = BYTE / 2u; half; half /= 2u", "half = 1u; half < BYTE; half *= 2u", "differ"),
    "the tile's first block for all of it": (
        "bool moves = i >= b.at + b.size;",
        "bool moves = false;\n        return moves;",
        "differ",
    ),
    "dead elements count": ("if (end > SLAB) end = SLAB;", "end = stop = SLAB;", "differ|nobody has written"),
    "the tiles of the tensor before": (
        "begin = first[blockIdx.x];",
        "begin = first[blockIdx.x ? blockIdx.x - 1 : 0];",
        "differ",
    ),
    "a product and a sum in one rounding": (
        "__fsub_rn(x, __fmul_rn(rate, u))",
        "__fmaf_rn(-rate, u, x)",
        "differ",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=() if number < 2 else pytest.mark.slow) for number, one in enumerate(FAULTS)],
)
def test_a_planted_fault_is_found(fault):
    old, new, found = FAULTS[fault]
    source = cuda.source()
    assert source.count(old) == 1
    problem = Problem((TILE + 1003, 5, 3000), torch.float32, 0.1)
    said = kinds_of(problem)["rows"]
    with pytest.raises((KernelFault, AssertionError), match=found):
        assert_equal(stepped(problem, *said, Emulator(source.replace(old, new), seed=2)), stepped(problem, *said))


CLIP = 0.01, 10.0


def stepped_on_gradient(problem, launcher=None, bias_step=3, device="cpu", spoil=None):
    """One step of LAMB on a gradient, by kernels or by the loops: what is written, and the sums that it follows from.

    spoil: called with p, g, m and v before it.
    """
    random, live = torch.Generator().manual_seed(9), problem.layout.live
    g, m = (torch.randn(len(problem.p), generator=random) for _ in range(2))
    p, v = problem.p.clone(), problem.v.clone()
    for x in (g, m):
        x[problem.layout.dead(0, len(x))] = 0
    if spoil is not None:
        spoil(p, g, m, v)
    vectors = p, g, m, v = tuple(x.to(device) for x in (p, g, m, v))
    given = *vectors, problem.h, bias_step, CLIP
    step = Step(*given, room=0) if launcher is None else CudaStep(launcher, *given)
    tiles = Tiles(live, p) if launcher is None else CudaTiles(live, p)
    versions = [x._version for x in vectors]
    c = step.descend_(tiles)
    step.done()
    assert [x._version > before for x, before in zip(vectors, versions, strict=True)] == [True, False, True, True]
    sums = torch.as_tensor(tiles.found).view(4, -1)[2:]
    return {"m": m, "v": v, "sums": sums, "c": c, "rates": torch.as_tensor(tiles.rates), "p": p}


@pytest.mark.law
@pytest.mark.parametrize(
    ("lengths", "decay", "bias_step"),
    [
        (LENGTHS[0], 0.0, 1),
        (LENGTHS[1], 0.1, None),
        ((5 * TILE + 17, 1, 1027), 0.1, 3),
        pytest.param(LENGTHS[2], 0.0, 1000, marks=pytest.mark.slow),
        pytest.param((300 * TILE + 5, 1000), 0.1, 3, marks=pytest.mark.slow),
    ],
)
def test_a_step_on_a_gradient_equals_that_of_the_compiled_loops_bit_for_bit(lengths, decay, bias_step):
    problem, launcher = Problem(lengths, torch.float32, decay), Emulator(cuda.source(), seed=3, resident=3)
    assert_equal(stepped_on_gradient(problem, launcher, bias_step), stepped_on_gradient(problem, None, bias_step))
    assert launcher.launched == ["measure_gradient", "trust_of", "move_floats"]


def spoiled(p, g, m, v):
    """What is no number, or infinite, and norms of 0: of p, of all of a tensor."""
    g[3], g[600], p[70], v[500] = torch.nan, torch.inf, -torch.inf, torch.nan
    p[1008:1072] = 0
    for x in (p, g, m, v):
        x[1072:1081] = 0


@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_what_is_no_number_or_infinite_in_a_step_on_a_gradient_is_that_of_the_loops(lr):
    problem = Problem((1000, 5, 64, 9, 24), torch.float32, 0.1)
    problem.h = replace(problem.h, lr=lr)
    found = stepped_on_gradient(problem, Emulator(cuda.source(), seed=1), spoil=spoiled)
    assert_equal(found, stepped_on_gradient(problem, spoil=spoiled))
    assert found["c"].tolist()[2:4] == [1, 1]
    assert lr or torch.equal(found["p"][1008:], torch.where(torch.arange(len(problem.p)) < 1081, 0, problem.p)[1008:])


def test_a_step_on_a_gradient_of_another_type_is_refused_before_anything_is_launched():
    problem, launcher = Problem((64,), torch.float64, 0.1), Emulator(cuda.source())
    with pytest.raises(ValueError, match=r"torch.float64\[64\] .* must be contiguous torch.float32"):
        stepped_on_gradient(problem, launcher)
    problem = Problem((64,), torch.float32, 0.1)
    shifted = [torch.zeros(65)[1:] for _ in range(4)]
    with pytest.raises(ValueError, match="multiples of 16"):
        CudaStep(launcher, *shifted, problem.h, 3, CLIP)
    assert launcher.launched == []


FAULTS_ON_A_GRADIENT = {
    "tiles are added up in float": ("total_of<2u, double>", "total_of<2u, float>"),
    "a moment in one rounding": (
        "__fadd_rn(mean, __fmul_rn(numbers.weight1, __fsub_rn(x, mean)))",
        "__fmaf_rn(numbers.weight1, __fsub_rn(x, mean), mean)",
    ),
    "a norm of 0 has a ratio": (
        "if (size > 0.f && update > 0.f) {\n        trust = larger(__fdiv_rn(size, update), least",
        "if (true) {\n        trust = larger(__fdiv_rn(size, update), least",
    ),
}


@pytest.mark.parametrize("fault", [pytest.param(one, marks=pytest.mark.slow) for one in FAULTS_ON_A_GRADIENT])
def test_a_fault_planted_in_a_step_on_a_gradient_is_found(fault):
    old, new = FAULTS_ON_A_GRADIENT[fault]
    source = cuda.source()
    assert source.count(old) == 1
    problem = Problem((1000, 5, 64, 9, 9 * TILE + 1003, 8 * TILE, 7 * TILE), torch.float32, 0.1)
    launcher = Emulator(source.replace(old, new), seed=2)
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(stepped_on_gradient(problem, launcher, spoil=spoiled), stepped_on_gradient(problem, spoil=spoiled))


def test_the_source_is_what_the_launches_take_it_for():
    source = cuda.source()
    assert int(re.search(r"#define THREADS (\d+)", source)[1]) == THREADS
    assert int(re.search(r"#define KINDS (\d+)u", source)[1]) == cuda.KINDS
    structures = {"Tile": cuda.RECORD, "Numbers": cuda.NUMBERS, "Bounds": cuda.BOUNDS}
    for name, record in structures.items():
        fields = re.search(rf"struct {name} {{(.*?)}};", source, re.S)[1]
        assert re.findall(r"(\w+)[,;]", fields) == list(record.names)
    assert set(kernels_in(source)) == KERNELS
