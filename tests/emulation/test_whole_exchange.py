"""The whole exchange on emulated kernels is that on numba's, bit for bit."""

import pytest
import torch

from tests.emulation.emulator import Emulator, require_compiler
from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.exchange import sign
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.groups.threads import run_threads
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.cpu import CpuKernels
from thinwire.comm.kernels.cuda import kernels as cuda
from thinwire.comm.kernels.cuda.kernels import CudaKernels
from thinwire.comm.layout import VectorLayout

LAYOUT = VectorLayout(3008, ((0, 1603), (1608, 3001)), ((0, 1608), (1608, 3008)))
BAD_STEP = 2


def exchanged(kernels, size, steps, keeps, monkeypatch, device="cpu"):
    """What every rank holds after so many steps; in one of them a rank's vector is not finite, and it is undone."""
    monkeypatch.setattr(sign, "kernels_for", lambda *_: kernels)

    def work(group):
        random = torch.Generator().manual_seed(group.rank)
        x = torch.zeros(LAYOUT.numel, device=device)
        reducer = flat_reducer(group, LAYOUT, SignCodec(256), x, bucket_elements=1024, keeps=keeps)
        memory, found = reducer.new_memory(), []
        for step in range(steps):
            for start, stop in LAYOUT.live:
                x[start:stop] = torch.randn(stop - start, generator=random)
            if step == BAD_STEP and group.rank == size - 1:
                x[700] = torch.inf
            reducer.begin(memory)
            for k in range(len(reducer.buckets)):
                if step:
                    reducer.launch_lerp(k, x, 0.1)
                else:
                    reducer.launch_sum(k, x)
            try:
                reducer.finish()
                reducer.commit()
            except NonFiniteInput:
                assert step == BAD_STEP
            result = reducer.last(memory)
            if result is not None:
                out = torch.empty(LAYOUT.numel, device=device)
                result.decode_(out)
                found.append(out)
            if step == BAD_STEP:  # what was undone is no last result
                break
        return found, memory.residual()

    return run_threads(size, work)


@pytest.mark.law
@pytest.mark.parametrize(
    ("size", "keeps"),
    [
        (3, Keeps.REPLICA),
        pytest.param(2, Keeps.ROWS, marks=pytest.mark.slow),
        pytest.param(4, Keeps.NOTHING, marks=pytest.mark.slow),
        pytest.param(8, Keeps.NOTHING, marks=pytest.mark.slow),
    ],
)
def test_the_exchange_on_emulated_kernels_is_that_on_numbas_bit_for_bit(size, keeps, monkeypatch):
    require_compiler()
    ours = exchanged(CudaKernels(Emulator(cuda.source(), 3)), size, 3, keeps, monkeypatch)
    theirs = exchanged(CpuKernels(), size, 3, keeps, monkeypatch)
    assert len(ours) == len(theirs) == size
    for (our_results, our_residual), (results, residual) in zip(ours, theirs, strict=True):
        assert len(our_results) == len(results) >= 2
        assert all(torch.equal(a, b) for a, b in zip(our_results, results, strict=True))
        assert torch.equal(our_residual, residual)
