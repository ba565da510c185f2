"""What tests/emulation/test_waits.py says of steps, asked of CUDA itself: any wait outside of finish() is an error."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from tests.emulation.test_waits import happens
from tests.emulation.whole_steps import cases, run
from thinwire.comm.exchange.exchange import Exchange

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda")


@contextmanager
def waits_are(mode: str) -> Iterator[Mapping[str, int]]:
    """Inside, a wait of the host is an "error", or nothing ("default")."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield {}
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("name", cases())
def test_a_step_waits_for_the_device_in_finish_alone(name, monkeypatch):
    case = cases()[name]
    told = run(
        case, GPU, lambda step: waits_are("default")
    )  # kernels are compiled, and it is known which step is which
    finish = Exchange.finish

    def waiting(self):
        with waits_are("default"):
            finish(self)

    monkeypatch.setattr(Exchange, "finish", waiting)
    run(case, GPU, lambda step: waits_are("default" if happens(name, told[step - 1]) else "error"))


@pytest.mark.parametrize("line", ["x.sum().item()", "x.cpu()", "x.nonzero()", "torch.ones(8, device='cpu').to(GPU)"])
def test_cuda_says_where_the_host_waits(line):
    x = torch.arange(8.0, device=GPU)
    with waits_are("error"), pytest.raises(RuntimeError, match="synchroniz"):
        eval(line, {"torch": torch, "x": x, "GPU": GPU})
