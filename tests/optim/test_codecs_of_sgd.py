"""1-bit SGD by every codec: the laws of one recursion, whatever its momentum is written in."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import sized
from tests.optim.muon.test_muon import backward, network
from tests.optim.reference.written_out import bits
from thinwire.comm import run_threads
from thinwire.comm.codecs import BY_NAME, PowerSGD, SignCodec, ThresholdCodec, TopKCodec
from thinwire.optim import OneBitSGD

SIZES = (1, 2, 3, 4, 8)
CODECS = {
    "int8": "int8",
    "int4": "int4",
    "topk": TopKCodec(64, 4),
    "threshold": ThresholdCodec(0.2),
    "powersgd": PowerSGD(2),
}
OTHERS = tuple(CODECS)


def made(net, group=None, codec="int8", **more):
    more = {"lr": 0.02, "momentum": 0.8, **more}
    given = CODECS.get(codec, SignCodec(16))
    return sized(OneBitSGD, bucket_elements=64)(net.parameters(), group=group, codec=given, **more)


def left(optimizer):
    return optimizer.vectors.momentum_error.residual()


@pytest.mark.few(1)
@every_value(
    {
        "size": SIZES,
        "codec": (*OTHERS, "sign"),
        "overlap": (False, True),
        "settings": ({}, {"nesterov": True}, {"dampening": 0.3}, {"weight_decay": 0.0}),
    }
)
@pytest.mark.law
def test_the_momentum_loses_nothing_that_its_residual_does_not_hold(size, codec, overlap, settings):
    """m' + R' = mu m + w mean_i (g_i + wd x) + R; x' = x - lr m', or Nesterov's. w: 1 in the first step."""

    def work(group):
        net, worst, mu = network(), 0.0, 0.8
        optimizer = made(net, group, codec, overlap=overlap, **{"weight_decay": 0.1, **settings})
        s, space = optimizer.vectors, optimizer.space
        for step in range(1, 13):
            m, x, before = s.m_N.clone(), space.p_N.clone(), left(optimizer)
            backward(net, step, group.rank)
            g = torch.zeros_like(x)
            for tensor in space.tensors:
                g[tensor.start : tensor.stop] = tensor.param.grad.view(-1)
            optimizer.step()
            optimizer.zero_grad()
            group.mean_(g)
            weight = 1.0 if step == 1 else 1 - settings.get("dampening", 0.0)
            due = mu * m + weight * (g + settings.get("weight_decay", 0.1) * x) + before - left(optimizer)
            moved = (1 + mu) * s.m_N - mu * m if "nesterov" in settings else s.m_N
            worst = max(worst, float((s.m_N - due).abs().max()), float((x - 0.02 * moved - space.p_N).abs().max()))
        return worst, float(left(optimizer).abs().max()), bits(space.p_N, s.m_N)

    found = run_threads(size, work)
    for worst, rest, held in found:
        assert worst < 1e-12
        assert (rest > 0) == (size > 1)
        assert torch.equal(held, found[0][2])


def orthonormal(p):
    """Gram and Schmidt, as in the paper."""
    p = p.clone()
    for at in range(p.shape[1]):
        for before in range(at):
            p[:, at] -= (p[:, before] @ p[:, at]) * p[:, before]
        p[:, at] /= p[:, at].norm()
    return p


@pytest.mark.law
@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_is_the_algorithm_written_out_from_where_the_last_step_ended(rank):
    """Vogels et al. 2019, Alg. 1 in Alg. 2, with torch's momentum, on three ranks; the first Q is the state's."""
    size, steps, mu, lr = 3, 8, 0.8, 0.02

    def work(group):
        net = network()
        optimizer = OneBitSGD(net.parameters(), lr=lr, momentum=mu, group=group, codec=PowerSGD(rank))
        space, path = optimizer.space, []
        q_N, x = optimizer.vectors.q_N.clone(), space.p_N.clone()
        for step in range(1, steps + 1):
            backward(net, step, group.rank)
            g = [tensor.param.grad.clone() for tensor in space.tensors]
            optimizer.step()
            optimizer.zero_grad()
            path.append((g, space.views(space.p_N.clone())))
        return space.views(q_N), space.views(x), path

    found = run_threads(size, work)
    q_of, x, _ = found[0]
    num_thin = 0
    for at, start in enumerate(x):
        x_t, m = start.clone(), torch.zeros_like(start)
        e = [torch.zeros_like(start) for _ in range(size)]
        rows, columns = (start.shape[0], start[0].numel()) if start.dim() > 1 else (0, 0)
        thin = rank * (rows + columns) < rows * columns
        num_thin += thin
        q = q_of[at].reshape(-1)[: columns * rank].view(columns, rank) if thin else None
        for step in range(steps):
            z = [path[step][0][at] + waits for (_, _, path), waits in zip(found, e, strict=True)]
            if thin:
                p = orthonormal(sum(one @ q for one in z) / size)
                own = [one.t() @ p for one in z]
                q = sum(own) / size
                out, e = p @ q.t(), [one - p @ mine.t() for one, mine in zip(z, own, strict=True)]
            else:
                out = sum(z) / size
            m = mu * m + out
            x_t = x_t - lr * m
            torch.testing.assert_close(found[0][2][step][1][at], x_t, rtol=0, atol=1e-11)
    assert num_thin == 2


@pytest.mark.parametrize("codec", [*BY_NAME, "powersgd"])
def test_a_step_sends_the_bytes_of_its_codec(codec):
    """Of a vector of 2^16 values on two ranks: half of it twice, and a flag a row."""

    def work(group):
        net = torch.nn.Linear(256, 256, bias=False)
        optimizer = OneBitSGD(net.parameters(), lr=0.05, group=group, codec=codec)
        for _ in range(2):
            before = group.stats.bytes_by_kind.copy()
            net(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
        assert "mean" not in group.stats.bytes_by_kind
        rows = group.stats.bytes_by_kind - before
        return rows["all_to_all"] + rows["all_gather"] + rows["sum"]

    due = {
        "sign": 1 / 8 + 4 / 4096,
        "int8": 1 + 4 / 256,
        "int4": 1 / 2 + 4 / 128,
        "topk": 120 / 4096,
        "threshold": 4 / 100,
        "powersgd": 4 * 2 * 512 / 2**16,
    }
    assert run_threads(2, work)[0] == pytest.approx(due[codec] * 2**16, rel=0.02)


@pytest.mark.parametrize("codec", ["int2", None, 3, torch.float16])
def test_what_is_no_codec_is_refused_in_a_sentence(codec):
    with pytest.raises(ValueError, match=r"codec = .*: must be one of sign, int8, int4, topk, threshold, or a Codec"):
        OneBitSGD(network().parameters(), lr=0.1, codec=codec)
