"""A small model trained by 0/1 Adam, with one batch a step and rank: what its tests share."""

import copy

import torch

from tests.optim.constructing import construct
from thinwire.optim import ZeroOneAdam

SIZES = (1, 2, 3, 4, 8)
FREEZE = 6
COUNTED = {"local_step_scaler": 6, "local_step_clipper": 4}  # intervals 1, 2, 4 from steps 7, 13, 19
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "var_freeze_step": FREEZE, "var_update_scaler": 2, "dense_steps": 0}
"""Without a dense start, which has its own tests: what comes after it is the same from the first step on."""


def small_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)).double()


MODELS = {seed: small_model(seed=seed) for seed in range(10)}
"""Made here: threads share torch's generator."""


def make(group=None, dtype=torch.float64, seed=0, params=lambda model: model.parameters(), **settings):
    model = copy.deepcopy(MODELS[seed]).to(dtype)
    return model, construct(ZeroOneAdam, params(model), group=group, **{**HYPER, **COUNTED, **settings})


def backward(model, optimizer, step, rank, factor=1.0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 7, generator=generator, dtype=dtype)
    optimizer.zero_grad()
    loss = (model(x) - torch.sin(x[:, :3] * 2)).square().mean() * factor
    loss.backward()
    return float(loss.detach())


def train(model, optimizer, steps, rank, each=lambda: None):
    for _ in range(steps):
        backward(model, optimizer, optimizer.num_steps + 1, rank)
        optimizer.step()
        each()


def synced(optimizer):
    return optimizer.saved["last_sync"] == optimizer.num_steps


def bits(*tensors):
    return torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors])


def weight_of(optimizer, group=0):
    """S of the round that the next step ends."""
    return optimizer._rounds_after(optimizer._groups())[group].weight


def everywhere(optimizer):
    """What steps are divided by, of all elements."""
    return optimizer.divisor(slice(0, len(optimizer.space.p_N)))


def errors(optimizer):
    memory = optimizer.vectors.update_error
    return torch.cat([memory.worker_N, memory.server_c])


def assert_errors_undone(optimizer, before):
    """To 4 ulp of the largest sum that was kept on the way: an error and what the exchange added to it."""
    after = errors(optimizer)
    s, g_N = optimizer.vectors, optimizer.space.g_N.nan_to_num(0, 0, 0)
    u_N = torch.zeros_like(g_N) if s.u_N is None else s.u_N
    given = u_N.abs() + HYPER["lr"] * (s.m_N.abs() + g_N.abs())
    largest = float(before.abs().max() + given.abs().max())
    assert (after - before).abs().max() <= 4 * torch.finfo(before.dtype).eps * largest


def snapshot(optimizer, *, with_errors=True):
    s = optimizer.vectors
    tensors = [optimizer.space.p_N, s.m_N, s.v_N, s.used, *(() if optimizer.at_sync else s.of_round())]
    tensors += [errors(optimizer)] if with_errors else []
    return bits(*tensors), copy.deepcopy(optimizer.saved), optimizer.num_steps, optimizer.frozen_at
