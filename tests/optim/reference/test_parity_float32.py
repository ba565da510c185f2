"""In float32, one step from equal state is that of the reference in float64, in every phase.

The wire has a sign for each value, so a value of rounding size may get either; none of these inputs has one.
"""

import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import (
    BLOCK,
    WARMUP,
    as_parameters,
    exchange_of,
    feed,
    flat_values,
    in_groups,
    ordered_hypers,
    ordered_start,
    silent_gradients,
    snapshot,
)
from tests.reference.exchange import Errors, laid_end_to_end
from tests.reference.papers import ReferenceOneBitAdam, ReferenceOneBitLamb
from thinwire.comm import run_threads
from thinwire.optim import OneBitAdam, OneBitLamb
from thinwire.optim.onebit_lamb import LONGEST_STEP


def one_step(size, kind, before):
    """x, m, v of this rank after step before + 1, and the state before it, in float32."""
    of = silent_gradients(silent=True)

    def work(group):
        parameters = as_parameters([tensor.float() for tensor in ordered_start()])
        optimizer = construct(kind, in_groups(parameters), warmup=WARMUP, group=group, block=BLOCK)
        for step in range(1, before + 1):
            feed(optimizer, parameters, [g.float() for g in of(step, size)[group.rank]])
        saved = optimizer.state_dict()  # the worker errors are zero from here on: R is all there is
        start = snapshot(optimizer, parameters)
        parts = {
            name: [t.double() for t in flat_values(optimizer, parameters, vector)]
            for name, vector in (saved["vectors"] | saved["residuals"]).items()
            if name.endswith("_N") or name == "momentum_error"
        }
        order = [next(at for at, p in enumerate(parameters) if p is t.param) for t in optimizer.space.tensors]
        per_tensor = {
            name: [float(vector[order.index(at)]) for at in range(len(order))]
            for name, vector in saved["vectors"].items()
            if name.endswith("_T")
        }
        feed(optimizer, parameters, [g.float() for g in of(before + 1, size)[group.rank]])
        return start, parts, per_tensor, snapshot(optimizer, parameters), (optimizer.space, parameters)

    return run_threads(size, work)


def as_reference(kind, size, before, begun):
    """The reference in float64, in the state that a float32 run is in."""
    (x, m, v), parts, per_tensor, _, (space, parameters) = begun
    shared = {
        "warmup": WARMUP,
        "exchange": exchange_of(size, space, parameters),
        "bias_correction": before < WARMUP,
    }
    x64 = [tensor.double() for tensor in x]
    if kind is OneBitAdam:
        reference = ReferenceOneBitAdam(x64, ordered_hypers(), **shared)
    else:
        reference = ReferenceOneBitLamb(
            x64,
            ordered_hypers(),
            **shared,
            ratio_without_floored=True,
            weigh_ratio=True,
            longest_step=LONGEST_STEP,
        )
        reference.c_avg, reference.r, reference.k = (per_tensor[name] for name in ("coeff_T", "factor_T", "scaling_T"))
        reference.v_fresh = parts["fresh_v_N"]
        reference.floored = [fresh.isinf() for fresh in reference.v_fresh]
    reference.t, reference.m, reference.v = before, [t.double() for t in m], [t.double() for t in v]
    residual = laid_end_to_end(parts["momentum_error"])
    # R in the server errors. The exchange in flat order is the same one behind a permutation of its input.
    errors = [torch.zeros_like(residual) for _ in range(size)]
    reference.exchange.inner.errors["momentum"] = Errors(errors, residual[reference.exchange.to_flat])
    return reference


@every_value({"kind": [OneBitAdam, OneBitLamb], "before": [4, WARMUP - 1, WARMUP, WARMUP + 9]}, only=(0, 2, 3))
def test_one_step_in_float32_is_that_of_float64(kind, before):
    size = 3
    results = one_step(size, kind, before)
    reference = as_reference(kind, size, before, results[0])
    rounded = [[g.float().double() for g in rank] for rank in silent_gradients(silent=True)(before + 1, size)]
    reference.step(rounded)
    for _, _, _, (x, m, _), _ in results:
        for got, due in ((x, reference.x), (m, reference.m)):
            for ours, theirs in zip(got, due, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
