"""Vectors, and the mean of some: what test_givers.py and the processes that it starts share."""

import torch

from thinwire.comm.codecs import Bf16Codec
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.layout import VectorLayout

NUMEL = 424
LAYOUT = VectorLayout(NUMEL, ((0, NUMEL - 3),), ((0, NUMEL),))
LIKE = torch.empty(0, dtype=torch.float64)


def reducer_of(group, bucket=200):
    return flat_reducer(group, LAYOUT, Bf16Codec(), LIKE, bucket_elements=bucket)


def given_by(rank, turn=0):
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * rank + turn), dtype=LIKE.dtype)
    x[-3:] = 0
    return x


def mean_of(reducer, x_N, givers):
    means = reducer.means("fp32")
    means.begin(givers=givers)
    for k in range(len(reducer.buckets)):
        means.launch(k, x_N)
    means.finish()
    return x_N
