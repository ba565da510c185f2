"""OneBitAdam and OneBitLamb driven by gradients made elsewhere, on n ranks as threads."""

import torch

from thinwire.comm import run_threads


def as_parameters(start):
    return [torch.nn.Parameter(tensor.clone()) for tensor in start]


def feed(optimizer, parameters, gradients):
    """One step with these gradients, as a loop of one's own would have them: new tensors each time."""
    for parameter, g in zip(parameters, gradients, strict=True):
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


def drive(size, start, make, gradients, steps, lrs=None):
    """Run on `size` ranks. make(parameters, group): an optimizer; gradients(step)[rank]: tensors; lrs(step): of all.

    Returns ([rank][step] -> (x, m, v), the optimizers).
    """

    def work(group):
        parameters = as_parameters(start)
        optimizer = make(parameters, group)
        path = {}
        for step in range(1, steps + 1):
            for param_group in optimizer.param_groups:
                param_group["lr"] = lrs(step) if lrs else param_group["lr"]
            feed(optimizer, parameters, gradients(step)[group.rank])
            path[step] = snapshot(optimizer, parameters)
        return path, optimizer

    results = run_threads(size, work)
    return [path for path, _ in results], [optimizer for _, optimizer in results]
