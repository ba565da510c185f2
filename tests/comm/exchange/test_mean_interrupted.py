"""Ctrl-C after the last wait of a mean comes when the mean is kept: its peers have kept it too."""

import signal
import threading

import pytest
import torch

from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.groups.threads import ThreadGroup
from thinwire.comm.layout import VectorLayout

LAYOUT = VectorLayout(64, ((0, 64),), ((0, 64),))


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_signal_after_the_last_wait_leaves_no_mean_open(wire):
    groups = ThreadGroup.create(2, 20.0)

    def reducer_of(group):
        return flat_reducer(group, LAYOUT, SignCodec(16), torch.empty(0, dtype=torch.float64))

    def peer():
        reducer = reducer_of(groups[1])
        for _ in range(2):
            reducer.full_(torch.full((64,), 2.5, dtype=torch.float64), wire)

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    reducer = reducer_of(groups[0])
    means = reducer.means(wire)
    host = means._pipeline.host

    def interrupted(x):
        signal.raise_signal(signal.SIGINT)
        return host(x)

    means._pipeline.host = interrupted
    with pytest.raises(KeyboardInterrupt):
        reducer.full_(torch.full((64,), 1.5, dtype=torch.float64), wire)
    means._pipeline.host = host
    assert not means.is_open
    reducer.full_(x := torch.full((64,), 1.5, dtype=torch.float64), wire)
    torch.testing.assert_close(x, torch.full_like(x, 2.0), rtol=0, atol=1e-2)
    thread.join(20)
    assert not thread.is_alive()
