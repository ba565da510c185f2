"""OneBitAdam and OneBitLamb driven by gradients made elsewhere, on n ranks as threads."""

import torch

from tests.optim.small_problem import gradients, start
from tests.reference.exchange import TwoPhase, block_units, exact_mean, floor_of
from tests.reference.papers import Hyper
from thinwire.comm import run_threads
from thinwire.comm.layout import Buckets


def as_parameters(tensors):
    return [torch.nn.Parameter(tensor.clone()) for tensor in tensors]


def feed(optimizer, parameters, grads):
    """One step with these gradients, as a loop of one's own would have them: new tensors each time."""
    for parameter, g in zip(parameters, grads, strict=True):
        parameter.grad = g.clone()
    optimizer.step()


def flat_values(optimizer, parameters, vector_N):
    """A flat vector as tensors in the order of `parameters`."""
    place = {id(tensor.param): tensor for tensor in optimizer.space.tensors}
    found = [place[id(parameter)] for parameter in parameters]
    return [vector_N[t.start : t.stop].view(p.shape).clone() for t, p in zip(found, parameters, strict=True)]


def snapshot(optimizer, parameters):
    """x, m and v after a step, in the order of `parameters`."""
    m, v = (flat_values(optimizer, parameters, vector) for vector in (optimizer.vectors.m_N, optimizer.vectors.v_N))
    return [p.detach().clone() for p in parameters], m, v


def drive(size, begin, make, of, steps, lrs=None):
    """Run on `size` ranks. make(parameters, group): an optimizer; of(step)[rank]: gradients; lrs(group, step): rates.

    Returns ([rank][step] -> (x, m, v), the optimizers).
    """

    def work(group):
        parameters = as_parameters(begin)
        optimizer = make(parameters, group)
        path = {}
        for step in range(1, steps + 1):
            for at, param_group in enumerate(optimizer.param_groups):
                param_group["lr"] = lrs(at, step) if lrs else param_group["lr"]
            feed(optimizer, parameters, of(step)[group.rank])
            path[step] = snapshot(optimizer, parameters)
        return path, optimizer

    results = run_threads(size, work)
    return [path for path, _ in results], [optimizer for _, optimizer in results]


GROUPS = ((2, 0, 3), (1, 4))
"""The tensors of small_problem in an order of one's own: vectors before matrices, two groups."""
ORDER = [at for members in GROUPS for at in members]
CHOICES = (
    {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.02},
    {"lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
)
WARMUP, STEPS, BLOCK = 10, 26, 16


def ordered_start():
    """The first tensor is zero, as a bias is initialised: LAMB's coefficient is 1 there at first."""
    found = [start()[at] for at in ORDER]
    return [torch.zeros_like(found[0]), *found[1:]]


def silent_gradients(silent):
    """A column of the matrix and all of the last tensor have no gradient until after the freeze, if `silent`."""

    def of(step, num_workers):
        made = [[g[at] for at in ORDER] for g in gradients(step, num_workers)]
        if silent and step <= WARMUP + 5:
            for g in made:
                g[1][:, 6] = 0
                g[4].zero_()
        return made

    return of


def in_groups(parameters):
    size = len(GROUPS[0])
    return [
        {"params": members, **choice}
        for members, choice in zip((parameters[:size], parameters[size:]), CHOICES, strict=True)
    ]


def ordered_hypers():
    return [Hyper(**choice) for members, choice in zip(GROUPS, CHOICES, strict=True) for _ in members]


def set_rates(reference, lrs, step):
    """lrs(group, step): that of each tensor's group."""
    of_tensors = [at for at, members in enumerate(GROUPS) for _ in members]
    for at, hyper in zip(of_tensors, reference.hyper, strict=True):
        hyper.lr = lrs(at, step)


def exchange_of(size, space, parameters):
    """The reference of the exchange of tensors in the order of `parameters`."""
    buckets = Buckets.cut(space.layout, cuts=space.cuts).spans
    ours = TwoPhase(block_units(space.layout, size, BLOCK, buckets)) if size > 1 else exact_mean
    return FlatOrder(ours, space, parameters)


class FlatOrder:
    """An exchange of vectors in another order: that of the flat vector."""

    def __init__(self, inner, space, parameters):
        self.inner, self.to_flat = inner, flat_order(space, parameters)

    def __call__(self, zs, memory):
        out = torch.empty_like(zs[0])
        out[self.to_flat] = self.inner([z[self.to_flat] for z in zs], memory)
        return out


def floor_in_flat_order(space, parameters):
    floor, to_flat = floor_of(block_units(space.layout, 1, BLOCK)), flat_tensor_order(space, parameters)

    def floored(vs):
        found = dict(zip(to_flat, floor([vs[at] for at in to_flat]), strict=True))
        return [found[at] for at in range(len(vs))]

    return floored


def flat_tensor_order(space, parameters):
    """Indices of `parameters` in the order of the flat vector."""
    index = {id(parameter): at for at, parameter in enumerate(parameters)}
    return [index[id(tensor.param)] for tensor in space.tensors]


def flat_order(space, parameters):
    """Positions of the elements of `parameters`, laid end to end, in the order of the flat vector."""
    pieces = torch.arange(sum(p.numel() for p in parameters)).split([p.numel() for p in parameters])
    return torch.cat([pieces[at] for at in flat_tensor_order(space, parameters)])


def follow(size, make, make_reference, lrs=None):
    """The largest difference of x, m and v from the reference at any step on any rank; replicas are bit-equal."""
    of = silent_gradients(silent=True)
    made = {}

    def remembering(parameters, group):
        optimizer = make(in_groups(parameters), group)
        if group.rank == 0:
            made["space"], made["parameters"] = optimizer.space, parameters
        return optimizer

    paths, optimizers = drive(size, ordered_start(), remembering, lambda step: of(step, size), STEPS, lrs)
    space, parameters = made["space"], made["parameters"]
    shared = {
        "warmup": WARMUP,
        "exchange": exchange_of(size, space, parameters),
        "bias_correction": True,
        "floor": floor_in_flat_order(space, parameters),
    }
    reference = make_reference(ordered_start(), ordered_hypers(), shared)
    worst = 0.0
    for step in range(1, STEPS + 1):
        if lrs:
            set_rates(reference, lrs, step)
        reference.step(of(step, size))
        for path in paths:
            pairs = zip(path[step], (reference.x, reference.m, reference.v), strict=True)
            worst = max(
                worst, *(float((a - b).abs().max()) for got, due in pairs for a, b in zip(got, due, strict=True))
            )
            for one, other in zip(path[step], paths[0][step], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return worst, optimizers[0], reference
