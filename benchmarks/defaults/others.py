"""Compressed Muon as other papers have it, in a page each, to stand beside OneBitMuon. Written from the papers.

    sign_muon   signs of each rank's orthogonalised momentum, majority vote, no error memory.  [Mishra et al. 2026,
                arXiv 2605.16311, Alg. 1]
    ef21_muon   a rank sends the part of its momentum that the others do not know yet, its largest values in the 9 bits
                of natural compression; orthogonalised behind the mean.  [Gruntkowska et al. 2025, arXiv 2510.00643]
    dion_8      low-rank factors of the momentum by power iteration, what they leave stays in it; rank fraction 1/8
    dion_16     and 1/16.  [Ahn et al. 2025, arXiv 2504.05295, Alg. 2; compressed data-parallel sync]
    tables_in_8_bits
                ours, not a paper's: OneBitMuon on matrices, Adam with exchanges in 8 bits on all else. Its bytes are
                those that the group counted

Matrices of blocks are theirs; embeddings, heads and vectors have AdamW on the mean gradient, as in those papers, at a
rate of their own (BESIDE), and their bytes are counted too. What crosses is formed exactly and averaged in floats;
`sent_bytes` is what the encoding would take: a ring's share for what is summed, all of it for what is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.protocol import Group
from thinwire.optim import Adam, OneBitMuon
from thinwire.optim.muon_math import SIZE, matrix
from thinwire.optim.muon_rules import rules_of

BESIDE = 1 / 6
"""Rate of AdamW over that of matrices, of the same order as their best rates' ratio."""
FLOAT, NATURAL_BITS, KEPT = 4, 9, 0.1
"""Bytes of a float; bits of a sign and an exponent; the share of values that EF21 sends."""


class OfPaper(torch.optim.Optimizer):
    """What all have: momentum, AdamW for what is no matrix, bytes. The matrices' step is `step_of`."""

    frozen_at = None

    def __init__(
        self, params: Iterable[Tensor], lr: float, group: Group, model: nn.Module, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.group, self.num_steps, self.sent_bytes = group, 0, 0.0
        self.rules = rules_of(self.param_groups, model)
        self.evidence: dict[str, Any] = {}
        live = sum(param.numel() for param in self.rules)
        self.space = SimpleNamespace(layout=SimpleNamespace(num_live=live))

    def prepare_to_save(self) -> None:
        """Nothing: parameters are common."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. Collective."""
        self.num_steps += 1
        for options in self.param_groups:
            for param in options["params"]:
                state = self.state[param]
                if self.rules[param] == "matrix":
                    u, lr = self.step_of(param.grad.reshape(len(param), -1), state).view_as(param), options["lr"]
                else:
                    u, lr = self._adam(self.mean(param.grad), state), options["lr"] * BESIDE
                param.mul_(1 - lr * options["weight_decay"]).sub_(u, alpha=lr)

    def step_of(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """The update of a matrix, alike on all ranks, of this rank's gradient. Modifies state."""
        raise NotImplementedError

    def momentum(self, g: Tensor, state: dict[str, Any], beta: float) -> Tensor:
        """m <- beta m + (1 - beta) g of this rank."""
        m: Tensor = state.setdefault("m", torch.zeros_like(g))
        m.lerp_(g, 1 - beta)
        return m

    def mean(self, x: Tensor, bits: float = 8.0 * FLOAT, *, gathered: bool = False) -> Tensor:
        """The mean over ranks, new; as many bits of each value are counted, as of a ring or of rows to everybody."""
        n, mean = self.group.size, x.clone()
        self.sent_bytes += (n - 1) * (1 if gathered else 2 / n) * x.numel() * bits / 8
        self.group.mean_(mean)
        return mean

    def _adam(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        m = self.momentum(g, state, 0.9)
        v = state.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 1e-2)
        root: Tensor = v.div(1 - 0.99**self.num_steps).sqrt_().add_(1e-8)
        return m.div(1 - 0.9**self.num_steps) / root


class SignMuon(OfPaper):
    """U = sign(sum_i sign(NS(m_i))), at the size of Muon's update. A vote goes to who counts it and comes back."""

    def step_of(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """As OfPaper.step_of."""
        return SIZE * self.mean(matrix(self.momentum(g, state, 0.95)).sign(), bits=1).sign()


class Ef21Muon(OfPaper):
    """G_i <- G_i + C(m_i - G_i); U = NS(mean_i G_i). What all keep of a rank is G_i, a mean of which is enough."""

    def step_of(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """As OfPaper.step_of. The way back is not compressed in the paper's main runs, nor counted here."""
        known = state.setdefault("known", torch.zeros_like(g))
        mean = state.setdefault("mean", torch.zeros_like(g))
        rest = self.momentum(g, state, 0.95) - known
        least = rest.abs().flatten().kthvalue(max(1, round((1 - KEPT) * rest.numel()))).values
        sent = torch.where(rest.abs() > least, _natural(rest), 0)
        known += sent
        index_bits = 1 / KEPT  # a bit a value says which are sent
        mean += self.mean(sent, bits=KEPT * (NATURAL_BITS + index_bits) / 2)  # one way of a ring's two
        return matrix(mean)


class Dion(OfPaper):
    """M_i += g_i; P = orth(mean_i M_i Q); W = mean_i M_i' P; M_i -= (1 - mu) P W'; Q = columns of W at length one.

    part: rank over the shorter side.
    """

    part = 1 / 8

    def step_of(self, g: Tensor, state: dict[str, Any]) -> Tensor:
        """As OfPaper.step_of."""
        rows, columns = g.shape
        rank = max(1, round(self.part * min(rows, columns)))
        m = state.setdefault("m", torch.zeros_like(g)).add_(g)
        if "q" not in state:
            state["q"] = torch.randn(columns, rank, generator=torch.Generator().manual_seed(rows * columns))
        p = torch.linalg.qr(self.mean(m @ state["q"])).Q
        w = self.mean(m.mT @ p)
        m -= (1 - 0.95) * p @ w.mT
        state["q"] = w / (w.norm(dim=0, keepdim=True) + 1e-8)
        u: Tensor = p @ state["q"].mT
        return SIZE * math.sqrt(max(rows, columns)) * u


class Dion16(Dion):
    """At half the rank."""

    part = 1 / 16


class TablesIn8Bits(torch.optim.Optimizer):
    """OneBitMuon on matrices; Adam, full_exchange="int8", on embeddings, heads and vectors at BESIDE of the rate."""

    frozen_at = None

    def __init__(
        self, params: Iterable[Tensor], lr: float, group: Group, model: nn.Module, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        rules = rules_of(self.param_groups, model)
        matrices = [param for param, rule in rules.items() if rule == "matrix"]
        tables = [param for param, rule in rules.items() if rule != "matrix"]
        told = {"params": matrices, "rule": "matrix"}
        self.matrices = OneBitMuon([told], lr, weight_decay=weight_decay, group=group)
        self.tables = Adam(tables, lr * BESIDE, weight_decay=weight_decay, group=group, full_exchange="int8")
        self.num_steps, self.evidence = 0, dict[str, Any]()
        live = sum(one.space.layout.num_live for one in (self.matrices, self.tables))
        self.space = SimpleNamespace(layout=SimpleNamespace(num_live=live))

    def prepare_to_save(self) -> None:
        """Nothing: parameters are common."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both, at the rate that this optimizer's group has. Collective."""
        self.num_steps += 1
        for optimizer, part in ((self.matrices, 1.0), (self.tables, BESIDE)):
            optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"] * part
            optimizer.step()


def _natural(x: Tensor) -> Tensor:
    """The nearest power of two: a sign and an exponent. The paper's rounds at random; this errs less."""
    return torch.where(x == 0, 0, x.sign() * torch.exp2(x.abs().clamp_(min=1e-30).log2().round()))


OTHERS = {
    "sign_muon": SignMuon,
    "ef21_muon": Ef21Muon,
    "dion_8": Dion,
    "dion_16": Dion16,
    "tables_in_8_bits": TablesIn8Bits,
}
