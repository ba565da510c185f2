"""The kernels of updates.cu, emulated, equal the compiled loops bit for bit; descend equals plain torch too."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.kernels.cases import NASTY, Case, assert_same, assert_same_floats
from tests.emulation.emulator import Emulator, KernelFault, kernels_in, require_compiler
from thinwire.comm.kernels.cuda.launch import THREADS
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.updates import SPAN, CudaUpdates, descend_in_torch_

HYPER = AdamHyper(slice(0, 8), 1.7e-3, 0.9, 0.997, 1e-8, 0.013)
EPS, INF = 1e-8, float("inf")
FOUND, LOST = torch.tensor(False), torch.tensor(True)
UPDATES = {
    "adam": lambda x: updates.adam_(x[0], x[1], x[2], x[3].abs_(), HYPER, 3),
    "adam, not corrected": lambda x: updates.adam_(x[0], x[1], x[2], x[3].abs_(), HYPER, None),
    "local": lambda x: updates.local_(x[0], x[1], x[2], x[3], x[4].abs_(), HYPER, 0.999, FOUND.to(x[0].device)),
    "first_local": lambda x: updates.first_local_(*x[:5], x[5].abs_(), HYPER, 0.999, FOUND.to(x[0].device)),
    "first_proposal": lambda x: updates.first_proposal_(x[0], x[1], x[2], HYPER),
    "propose": lambda x: updates.propose_(x[0], x[1], x[2], x[3], HYPER, 0.999),
    "receive": lambda x: updates.receive_(x[0], x[1], x[2], x[3].abs_(), x[4], (-1.0, 3e-3, 0.7, 0.999), EPS),
    "receive in place": lambda x: updates.receive_(x[0], x[0], x[2], x[3].abs_(), x[4], (1.0, 3e-3, INF, 1.0), EPS),
}
SIZES = [8, 1016, 1024, 1032, SPAN - 8, SPAN, SPAN + 8, 2 * SPAN + 1032]


@pytest.fixture(autouse=True)
def _compiler():
    require_compiler()


def vectors(numel, seed):
    """Six in the middle of one, so that what is written beside them is seen; NaN and infinities among their values."""
    random = torch.Generator().manual_seed(seed)
    whole = torch.randn((6, numel + 16), generator=random)
    nasty = torch.tensor([*NASTY, float("nan"), float("inf"), -float("inf")])
    at = torch.rand(whole.shape, generator=random) < 0.1
    whole[at] = nasty[torch.randint(0, len(nasty), (int(at.sum()),), generator=random)]
    return whole


def updated(update, whole, cuda, monkeypatch):
    monkeypatch.setattr(updates, "_on_cuda", lambda _: cuda)
    mine = whole.clone()
    UPDATES[update]([x[8:-8] for x in mine])
    return mine


def emulated(seed=1):
    return CudaUpdates(Emulator(updates.source(), seed))


@pytest.mark.few(21)
@pytest.mark.law
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("numel", SIZES)
def test_equal_to_the_compiled_loop_bit_for_bit(update, numel, monkeypatch):
    whole = vectors(numel, seed=numel)
    ours = updated(update, whole, emulated(), monkeypatch)
    assert_same_floats(ours, updated(update, whole, None, monkeypatch), update)


@pytest.mark.law
@pytest.mark.parametrize("first", [False, True])
def test_a_lost_gradient_counts_as_zero_bit_for_bit(first, monkeypatch):
    def moved(cuda, g, lost):
        monkeypatch.setattr(updates, "_on_cuda", lambda _: cuda)
        mine = vectors(SPAN + 8, seed=1)
        p, m, u, begun, v = (x[8:-8] for x in mine[:5])
        if first:
            updates.first_local_(p, g, m, u, begun, v.abs_(), HYPER, 0.999, lost)
        else:
            updates.local_(p, g, m, u, v.abs_(), HYPER, 0.999, lost)
        return mine

    g = vectors(SPAN + 8, seed=2)[0, 8:-8]
    ours = moved(emulated(), g, LOST)
    assert_same_floats(ours, moved(None, torch.zeros_like(g), FOUND), "all")
    with pytest.raises(AssertionError):
        assert_same_floats(ours, moved(emulated(), g, FOUND), "all")


@pytest.mark.law
@settings(max_examples=15)
@given(
    sizes=st.lists(st.sampled_from([8, 16, 24, 56, 64, 120, 1000, 2056]), min_size=0, max_size=5),
    dead=st.sets(st.integers(0, 3000), max_size=12),
    seed=st.integers(0, 2**32),
    decay=st.sampled_from([0.0, 1.3e-4]),
    order=st.integers(0, 100),
    variance=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_descending_equals_plain_torch_bit_for_bit(sizes, dead, seed, decay, order, variance):
    case = Case(sizes, sorted(dead), num_rows=1, seed=seed)

    def run(descend):
        p = case.buffers["c"].clone()
        p_c, v_c = p[8 : 8 + case.numel], case.slice("x").abs().to(variance)
        descend(p_c, v_c, case.wire("last"), 1.7e-3, decay, 1e-8, case.table)
        return p

    def descend(p_c, v_c, rows, lr, decay, eps, table):
        emulated(order).descend(p_c, v_c, rows, (eps, lr, 1 - decay), table)

    assert_same_floats(run(descend), run(descend_in_torch_), "p")


@pytest.mark.law
@pytest.mark.parametrize("sizes", [[], [8], [2056, 64, 1000], [4096, 24]])
def test_receiving_rows_equals_the_compiled_loop_bit_for_bit(sizes, monkeypatch):
    case = Case(sizes, [3, 2060, 2061], num_rows=1, seed=4)

    def received(cuda):
        monkeypatch.setattr(updates, "_on_cuda", lambda _: cuda)
        mine = case.clone()
        p, start, v, m = (mine.slice(name) for name in ("c", "x", "x", "out_c"))
        updates.receive_rows_(p, start, v.abs(), m, mine.wire("last"), (-1.0, 3e-3, 0.7, 0.999), EPS, mine.table)
        return mine

    assert_same(received(emulated()), received(None))


def test_what_is_not_aligned_or_does_not_fit_is_refused_before_anything_is_launched():
    launcher, case = Emulator(updates.source()), Case([64], [], num_rows=1)
    cuda, odd = CudaUpdates(launcher), torch.zeros(65)[1:]
    with pytest.raises(ValueError, match="must begin at a multiple of 16"):
        cuda.run("propose", (odd, odd, odd, odd), (1.0, 1.0, 1.0))
    for wrong in (torch.zeros(()), torch.zeros(1, dtype=torch.bool), FOUND.to("meta")):
        with pytest.raises(ValueError, match="must be a bool without dimensions on cpu"):
            cuda.run("local", (torch.zeros(64),) * 5, (1.0,) * 4, wrong)
    for wrong in (odd, torch.zeros(56)):
        with pytest.raises(ValueError, match=r"of shape \(64,\), at a multiple of 16"):
            cuda.over_rows("descend", (wrong, torch.zeros(64)), case.wire("last"), (1e-8, 1.0, 1.0), case.table)
    assert launcher.launched == []


def test_a_planted_fault_is_found(monkeypatch):
    source = updates.source()
    told = [
        ("if (next < stop) load(next, 1);", "load(next, 1);", "outside of its memory"),
        (
            "put_four(m, i, m4[r]), put_four(v, i, v4[r]), put_four(p, i, p4[r]);",
            "put_four(m, i + 1, m4[r]);",
            "aligned",
        ),
    ]
    for old, new, found in told:
        assert source.count(old) == 1
        with pytest.raises(KernelFault, match=found):
            updated("adam", vectors(1032, 1), CudaUpdates(Emulator(source.replace(old, new))), monkeypatch)


def test_the_source_is_what_the_launches_take_it_for():
    source = updates.source()
    assert int(re.search(r"#define THREADS (\d+)", source)[1]) == THREADS
    assert SPAN == 2 * 4 * THREADS
    over_rows = {"descend", "descend_narrow", "receive_rows"}
    assert {name.split(",")[0].split(" ")[0] for name in UPDATES} | over_rows == set(kernels_in(source))
