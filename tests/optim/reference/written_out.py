"""The reference of papers.py that an optimizer in our settings must follow, built from the optimizer.

Its tensors are in the order of the flat vector, so that blocks are the same spans.
"""

import torch

from tests.optim.constructing import construct
from tests.reference.exchange import TwoPhase, block_units, exact_mean, floor_of
from tests.reference.muon import MuonHyper, ReferenceMuon
from tests.reference.papers import (
    Fresh,
    Hyper,
    ReferenceAdam,
    ReferenceLamb,
    ReferenceOneBitAdam,
    ReferenceOneBitLamb,
    ReferenceSgd,
    ReferenceZeroOneAdam,
)
from thinwire.optim import SGD, Adam, Lamb, Muon, OneBitAdam, OneBitLamb, OneBitMuon, ZeroOneAdam
from thinwire.optim.engine.schedule import is_variance_step
from thinwire.optim.onebit_lamb import LONGEST_STEP

CLASSES = {
    "adam": Adam,
    "lamb": Lamb,
    "sgd": SGD,
    "onebit_adam": OneBitAdam,
    "onebit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
    "muon": Muon,
    "onebit_muon": OneBitMuon,
}
FREEZING = ("onebit_adam", "onebit_lamb", "zero_one_adam")
COMPRESSED = (*FREEZING, "onebit_muon")
VAR_UPDATE_SCALER, LOCAL_STEP_SCALER, LOCAL_STEP_CLIPPER = 2, 4, 4


def make(name, param_groups, group=None, *, warmup=5, block=4096, **more):
    """Our optimizer; warmup: the steps until the freeze, block: values that share a scale, both where it has them."""
    if name in ("sgd", "muon", "onebit_muon"):
        param_groups = [{k: v for k, v in g.items() if k not in ("betas", "eps")} for g in param_groups]
    if name in ("muon", "onebit_muon"):
        param_groups = with_rules(param_groups)
    given = {"block": block}
    if name in ("onebit_adam", "onebit_lamb"):
        given["warmup"] = warmup
    if name == "zero_one_adam":
        given.update(
            var_freeze_step=warmup,
            dense_steps=0,
            var_update_scaler=VAR_UPDATE_SCALER,
            local_step_scaler=LOCAL_STEP_SCALER,
            local_step_clipper=LOCAL_STEP_CLIPPER,
        )
    return construct(CLASSES[name], param_groups, group=group, **given, **more)


def with_rules(param_groups):
    """Groups of vectors alone say so, for else a model without a matrix is refused."""
    listed = [{**group, "params": list(group["params"])} for group in param_groups]
    is_vector = lambda p: p.numel() == 1 or (p.dim() != 2 and max(p.shape) == p.numel())  # noqa: E731
    alone = [all(map(is_vector, group["params"])) for group in listed]
    return [{**group, "rule": "vector"} if is_alone else group for group, is_alone in zip(listed, alone, strict=True)]


def sync_steps(warmup, steps):
    """Of 0/1 Adam as `make` makes it: all until the freeze, then an interval after the last one."""
    found, last = set(range(1, warmup + 1)), warmup
    for step in range(warmup + 1, steps + 1):
        if step - last >= min(LOCAL_STEP_CLIPPER, 2 ** ((step - warmup - 1) // LOCAL_STEP_SCALER)):
            found.add(step)
            last = step
    return found


def per_tensor(optimizer, value_of):
    """value_of(the parameter group) for each tensor of the flat vector."""
    owner = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return [value_of(owner[id(tensor.param)]) for tensor in optimizer.space.tensors]


def in_pieces(optimizer, vector_N):
    """A flat vector as float64 tensors, a copy."""
    return [view.double().clone() for view in optimizer.space.views(vector_N)]


def buckets_of(optimizer):
    """The spans that it exchanges one by one."""
    return optimizer.reduce.buckets.spans


def reference_of(name, optimizer, start, *, size, warmup=5, block=4096, steps=100):
    """The reference of `make(name, ...)`; start: its tensors, in flat order."""
    if name == "sgd":
        group = optimizer.param_groups[0]
        return ReferenceSgd(start, group["lr"], group["momentum"], group["weight_decay"])
    if name in ("muon", "onebit_muon"):
        groups = per_tensor(optimizer, lambda g: g)
        rules = [optimizer.rules[tensor.param] for tensor in optimizer.space.tensors]
        of_each = [
            MuonHyper(g["lr"], g["momentum"], g["weight_decay"], g["nesterov"], rule)
            for g, rule in zip(groups, rules, strict=True)
        ]
        units = block_units(optimizer.space.layout, size, block, buckets_of(optimizer))
        exchange = None if name == "muon" else TwoPhase(units) if size > 1 else exact_mean
        return ReferenceMuon(start, size, of_each, exchange)
    hyper = per_tensor(optimizer, lambda g: Hyper(g["lr"], g["betas"], g["eps"], g["weight_decay"]))
    layout = optimizer.space.layout
    if name == "adam":
        return ReferenceAdam(start, hyper)
    if name == "lamb":
        return ReferenceLamb(start, hyper, min_coeff=0.01, max_coeff=10.0)
    units = block_units(layout, size, block, buckets_of(optimizer))
    ours = {
        "exchange": TwoPhase(units) if size > 1 else exact_mean,
        "bias_correction": True,
        "floor": floor_of(block_units(layout, 1, block)),
    }
    if name == "onebit_adam":
        return ReferenceOneBitAdam(start, hyper, warmup=warmup, **ours)
    if name == "onebit_lamb":
        return ReferenceOneBitLamb(
            start,
            hyper,
            warmup=warmup,
            weigh_ratio=True,
            ratio_without_floored=True,
            longest_step=LONGEST_STEP,
            **ours,
        )
    return ReferenceZeroOneAdam(
        start,
        size,
        hyper,
        sync_step=sync_steps(warmup, steps).__contains__,
        variance_step=lambda step: step <= warmup and is_variance_step(step, VAR_UPDATE_SCALER),
        eps_outside=True,
        fresh=Fresh.AT_FIRST,
        freeze_at=warmup,
        longest_step=ZeroOneAdam.longest_step,
        skip_idle=True,
        as_momentum=True,
        **ours,
    )


def parameters_of(name, reference, rank):
    """x of a worker: in 0/1 Adam each has its own."""
    return reference.x[rank] if name == "zero_one_adam" else reference.x


def bits(*tensors):
    """One after another, byte by byte: equal only where every bit is."""
    return torch.cat([tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])
