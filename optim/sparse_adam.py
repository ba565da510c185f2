"""SparseAdam under data parallelism, for nn.Embedding(sparse=True) and EmbeddingBag: only touched rows cost anything.

    rows = those that some rank's gradient has                 (their numbers cross, 4 bytes each)
    g[rows] <- mean_i of the ranks' gradients, in 8 bits        out + R' = mean_i g_i + R, row by row
    m, v, x of those rows: torch.optim.SparseAdam's step        t counts the steps of this optimizer

What 8 bits leave out of a row is kept with it, and is sent when some rank touches it again: until then it costs no
byte and no pass. Each row has a scale of its own. v is built from the gradients that were received, which 8 bits leave
nearly as they are and one bit does not (docs/algorithms.md). One optimizer exchanges all its rows of one width at once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.default import default_reducer, given_or_default
from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.groups.texts import agree, gather_texts, refuse_differing
from thinwire.comm.kernels.choose import warm_up_int8
from thinwire.comm.layout import BYTE, VectorLayout, round_up
from thinwire.comm.protocol import Group
from thinwire.contract.hyperparameters import BETAS, EPS, LR
from thinwire.optim.engine.checking import ABSENT, Row, is_count, merged_groups, refuse, refuse_missing
from thinwire.optim.engine.hyperparameters import check_group
from thinwire.optim.engine.local import is_dtensor, mark
from thinwire.optim.engine.orphans import listed, refuse_copy, refuse_listed_otherwise
from thinwire.optim.engine.parameters import digest

Exchanged = Literal["int8", "fp32"]
VECTORS = ("m", "v", "residual")
"""Of each width in a state_dict."""
DENSE, NOT_FINITE = -2, -1
"""In the place of a count of rows: a gradient that is not sparse, or not in its rows alone; one that is not finite."""


class SparseAdam(Optimizer):
    """torch.optim.SparseAdam on the mean gradient of all ranks, whose rows cross in 8 bits with error memory by row.

    params: matrices of float32 or float64, whose gradients are sparse: of nn.Embedding(sparse=True), EmbeddingBag. lr,
    betas, eps: as in torch.optim.SparseAdam. group: the ranks (None: torch.distributed's default group, or this process
    alone). exchange: "int8", or "fp32", which leaves nothing out and keeps no error memory.
    A value takes 4 bytes each as m, v and worker error, and 4 / ranks as server error. step() is collective, also for a
    rank whose batch has touched no row; so is the constructor, which sends rank 0's parameters. Raises: ValueError;
    PeerLost, WireMismatch.
    """

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler, which then always calls step(): it is refused

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS.default,
        *,
        group: Group | None = None,
        exchange: Exchanged = "int8",
    ) -> None:
        if exchange not in get_args(Exchanged):
            raise ValueError(f'exchange = {exchange!r}: must be "int8" or "fp32"')
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.exchange, self.num_steps, self.group = exchange, 0, given_or_default(group)
        self._listed = listed(self.param_groups)
        if len(set(self._listed)) < len(self._listed):
            raise ValueError("params has a parameter twice, whose gradient would count twice: pass a shared one once")
        by_width: dict[tuple[int, torch.dtype, torch.device], list[tuple[Tensor, dict[str, Any]]]] = {}
        for param_group in self.param_groups:
            _check_group(param_group)
            for param in param_group["params"]:
                if is_dtensor(param):
                    raise ValueError(
                        f"a DTensor of shape {tuple(param.shape)}: SparseAdam exchanges rows of whole tables. Leave "
                        "its layer out of fully_shard(), on every rank, and train it beside (docs/sharded.md)"
                    )
                if param.dim() != 2 or param.dtype not in (torch.float32, torch.float64):
                    what = f"a parameter of {param.dtype}, shape {tuple(param.shape)}"
                    raise ValueError(f"{what}: must be a matrix of float32 or float64, as that of an nn.Embedding is")
                key = (param.shape[1], param.dtype, param.device)
                by_width.setdefault(key, []).append((param, param_group))
        self.tables = [Table(entries, self.group, exchange) for entries in by_width.values()]
        shapes = [[list(param.shape) for param in table.params] for table in self.tables]
        facts: dict[str, int | str] = {"shapes of tables": zlib.crc32(str(shapes).encode()), "exchange": exchange}
        agree(self.group, facts, self.tables[0].params[0])
        for table in self.tables:
            for param in table.params:
                self.group.broadcast_(param.data)
            table.note_written()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """In the constructor alone: state is laid out for all rows at once. Raises: RuntimeError after it."""
        if hasattr(self, "tables"):
            raise RuntimeError("a group cannot be added to SparseAdam: make it anew, over all groups")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """As FlatOptimizer's. Raises: TypeError."""
        refuse_copy(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, collective. Raises: PeerLost, after which ranks may differ: go on from a checkpoint.

        ValueError for a gradient that is not sparse, or a table written on one rank, NonFiniteInput, WireMismatch where
        ranks differ in their hyperparameters or in how many steps they have made, alike on every rank, and then nothing
        has changed.
        RuntimeError for param_groups edited by hand.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError("a GradScaler calls SparseAdam.step(): use torch.autocast with bfloat16 and no scaler")
        refuse_listed_otherwise(self.param_groups, self._listed)
        given, alike = [table.touched() for table in self.tables], json.dumps(self._alike()).encode()
        counts = [fault or len(ids) for ids, _, fault in given]
        is_written = any(table.is_written for table in self.tables)
        own = self.tables[0].m_VD.new_tensor([*counts, is_written, zlib.crc32(alike)], dtype=torch.int64)
        counts_nT = gathered(self.group, own).tolist()
        if len({counts.pop() for counts in counts_nT}) > 1:
            refuse_differing([json.loads(text) for text in gather_texts(self.group, alike, own.device)])
        written = [counts.pop() for counts in counts_nT]
        if any(written):
            self._refuse_written_apart()
        _refuse_faults(counts_nT)
        for at, (table, (ids, values, _)) in enumerate(zip(self.tables, given, strict=True)):
            table.step(self.num_steps + 1, ids, values, max(counts[at] for counts in counts_nT))
        self.num_steps += 1
        return loss

    def _refuse_written_apart(self) -> None:
        """Collective, where some rank has written a table since the last step. Raises: ValueError on all of them."""
        params = [param for table in self.tables for param in table.params]
        own = self.tables[0].m_VD.new_tensor([digest(param) for param in params], dtype=torch.int64).view(-1)
        all_nP = gathered(self.group, own).view(self.group.size, len(params), -1).cpu()
        for at, param in enumerate(params):
            ranks = [rank for rank, theirs in enumerate(all_nP) if not torch.equal(theirs[at], all_nP[0, at])]
            if ranks:
                raise ValueError(
                    f"a table of shape {list(param.shape)} holds other values on ranks {ranks} than on rank 0, for it "
                    "was written between two steps: nn.Embedding(max_norm=...) does so in each forward, to the rows of "
                    "one rank's own batch. Leave max_norm out, or write tables alike on every rank; nothing was changed"
                )
        for table in self.tables:
            table.note_written()

    def residual(self) -> list[Tensor]:
        """R of the rows of each width: float[rows, width], the same on every rank. Collective. Raises: PeerLost."""
        return [table.residual() for table in self.tables]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """All but the parameters, for any number of ranks. Collective. The live run goes on from R as a loaded one."""
        residuals = self.residual()
        for table, left_VD in zip(self.tables, residuals, strict=True):
            table.restore(left_VD)
        return {
            "optimizer": type(self).__name__,
            "num_steps": self.num_steps,
            "param_groups": [{k: v for k, v in one.items() if k != "params"} for one in self.param_groups],
            "tables": [
                {"m": one.m_VD.clone(), "v": one.v_VD.clone(), "residual": left_VD}
                for one, left_VD in zip(self.tables, residuals, strict=True)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state_dict of the same parameters, saved with any number of ranks. Local.

        Raises: ValueError saying what differs; then nothing has changed.
        """
        theirs = self._checked(state_dict)
        groups = merged_groups(self.param_groups, _check_group, state_dict["param_groups"])
        for own, saved in zip(self.param_groups, groups, strict=True):
            own.update(saved)
        self.num_steps = state_dict["num_steps"]
        for table, one in zip(self.tables, theirs, strict=True):
            table.m_VD.copy_(one["m"])
            table.v_VD.copy_(one["v"])
            table.restore(one["residual"])

    def _checked(self, state_dict: Mapping[str, Any]) -> Sequence[Mapping[str, Tensor]]:
        """The tables of a state_dict that this optimizer can go on from. Raises: ValueError."""
        if not isinstance(state_dict, Mapping) or state_dict.get("optimizer") != type(self).__name__:
            raise ValueError("state_dict is not of SparseAdam of thinwire.optim: give what its state_dict() returned")
        refuse_missing("state_dict", state_dict, ("num_steps", "param_groups", "tables"))
        steps, tables = state_dict["num_steps"], state_dict["tables"]
        refuse([("num_steps", steps, is_count(steps), "must be a whole number, at least 0")])
        mine = [list(table.m_VD.shape) for table in self.tables]
        found = len(tables) if isinstance(tables, list | tuple) else tables
        refuse([("tables", found, found == len(mine), f"needed is a list of {len(mine)}, of shapes {mine}")])
        for at, (shape, one) in enumerate(zip(mine, tables, strict=True)):
            refuse([(f"tables[{at}]", one, isinstance(one, Mapping), "must be a dict")])
            refuse_missing(f"tables[{at}] of state_dict", one, VECTORS)
            refuse(_matrices(f"tables[{at}]", one, shape))
        checked: Sequence[Mapping[str, Tensor]] = tables
        return checked

    def _alike(self) -> dict[str, str]:
        """What all ranks must step with alike, in words."""
        found = {"steps": str(self.num_steps)}
        for at, one in enumerate(self.param_groups):
            betas = [float(beta) for beta in one["betas"]]
            found[f"lr, betas, eps of group {at}"] = f"{float(one['lr'])}, {betas}, {float(one['eps'])}"
        return found


class Table:
    """The rows of all parameters of one width, one after another: V rows of D values, of which a step touches few.

    e_VD: what this rank has left out of what it gave; E_SD: of what it serves, rows rank, rank + n, ... of the table.
    """

    def __init__(self, entries: Sequence[tuple[Tensor, dict[str, Any]]], group: Group, exchange: Exchanged) -> None:
        self.params, self._groups = [param for param, _ in entries], [param_group for _, param_group in entries]
        self._group, self._exact, self._width = group, exchange == "fp32", self.params[0].shape[1]
        self._first = torch.tensor([0, *map(len, self.params)], dtype=torch.int64, device="cpu").cumsum(0)
        num_rows, like = int(self._first[-1]), self.params[0].detach()
        self.m_VD, self.v_VD = (like.new_zeros(num_rows, self._width) for _ in range(2))
        kept = 0 if self._exact else num_rows
        self.e_VD = like.new_zeros(kept, self._width)
        self.E_SD = like.new_zeros(-(-kept // group.size), self._width)
        if like.device.type == "cpu":
            warm_up_int8(like.dtype)  # not in the first exchange, where peers would wait for it
        self._marks: list[tuple[int, int]] = []
        """What changes when somebody else writes a parameter: a step writes through `.data`, which leaves no trace."""
        self._slots = 0
        self._reduce: Reducer
        self._memory: ErrorMemory

    @property
    def is_written(self) -> bool:
        """Has somebody else written a parameter since note_written()?"""
        return [mark(param) for param in self.params] != self._marks

    def note_written(self) -> None:
        """Go by what parameters hold now."""
        self._marks = [mark(param) for param in self.params]

    def step(self, t: int, ids: Tensor, values: Tensor, most: int) -> None:
        """One step of the rows that some rank has touched. ids, values: its own. most: ids of a rank. Collective."""
        rows = self._union(ids, most)
        if not len(rows):
            return
        mean_rD = self._mean(rows, ids, values)
        m, v = self.m_VD[rows], self.v_VD[rows]
        for at, (param, param_group) in enumerate(zip(self.params, self._groups, strict=True)):
            low, high = torch.searchsorted(rows, self._first[at : at + 2].to(rows.device)).tolist()
            if low == high:
                continue
            g, of = mean_rD[low:high], slice(low, high)
            (beta1, beta2), eps = param_group["betas"], param_group["eps"]
            m[of] += (g - m[of]).mul_(1 - beta1)
            v[of] += (g * g - v[of]).mul_(1 - beta2)
            rate = float(param_group["lr"]) * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
            param.data[rows[of] - int(self._first[at])] -= (m[of] / v[of].sqrt().add_(eps)).mul_(rate)
        self.m_VD[rows], self.v_VD[rows] = m, v

    def residual(self) -> Tensor:
        """R: what all ranks have left out together, float[V, D]. Collective. Raises: PeerLost."""
        if self._exact:
            return torch.zeros_like(self.m_VD)
        residual_VD = self.e_VD / self._group.size
        own_VD = residual_VD[self._group.rank :: self._group.size]
        own_VD += self.E_SD[: len(own_VD)]
        self._group.start_sum_(residual_VD).wait()
        return residual_VD

    def restore(self, residual_VD: Tensor) -> None:
        """Hold this R: each rank that of the rows that it serves. Local."""
        if self._exact:
            return
        own_VD = residual_VD[self._group.rank :: self._group.size]
        self.e_VD.zero_()
        self.E_SD[: len(own_VD)] = own_VD

    def touched(self) -> tuple[Tensor, Tensor, int]:
        """The rows that this rank's gradients have, ascending; their values; what is wrong with them, or 0. Local."""
        device, fault = self.m_VD.device, 0
        ids, values = [torch.empty(0, dtype=torch.int64, device=device)], [self.m_VD[:0]]
        for first, grad in zip(self._first.tolist(), (param.grad for param in self.params), strict=False):
            if grad is not None and (grad.layout != torch.sparse_coo or grad.sparse_dim() != 1):
                fault = DENSE
            elif grad is not None:
                ids.append(grad.coalesce().indices()[0] + first)
                values.append(grad.coalesce().values())
        every = torch.cat(values)
        return torch.cat(ids), every, fault or (0 if bool(torch.isfinite(every).all()) else NOT_FINITE)

    def _union(self, ids: Tensor, most: int) -> Tensor:
        """The rows that some rank has touched, ascending. Collective."""
        narrow = torch.int32 if len(self.m_VD) < 1 << 31 else torch.int64
        padded = torch.full((most,), -1, dtype=narrow, device=ids.device)
        padded[: len(ids)] = ids
        found = gathered(self._group, padded).flatten()
        rows: Tensor = torch.unique(found[found >= 0].to(torch.int64))
        return rows

    def _mean(self, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """The mean gradient of these rows, with what waits of them. Collective; after an error nothing has changed."""
        n, rank = self._group.size, self._group.rank
        owner = rows % n
        counts = torch.bincount(owner, minlength=n)
        self._fit(int(counts.max()))
        order = torch.argsort(owner, stable=True)
        place = torch.empty_like(rows)
        place[order] = (
            torch.arange(len(rows), dtype=torch.int64, device=rows.device) - (counts.cumsum(0) - counts)[owner[order]]
        )
        slots, mine = owner * self._slots + place, owner == rank
        served, own = place[mine], torch.div(rows[mine], n, rounding_mode="floor")
        wide, numel = round_up(self._width, BYTE), n * self._slots * round_up(self._width, BYTE)
        x_N = self.m_VD.new_zeros(numel)
        at = x_N.view(-1, wide)[:, : self._width]
        at[slots[torch.searchsorted(rows, ids)]] = values
        if self._exact:
            self._reduce.full_(x_N)
            return at[slots]
        kept = [(self.e_VD, rows, slots), (self.E_SD, own, served)]
        for (table, of, where), side in zip(kept, self._sides(), strict=True):
            side[where, : self._width] = table[of]  # what other slots hold nobody reads
        self._reduce.compressed_(x_N, self._memory)
        for (table, of, where), side in zip(kept, self._sides(), strict=True):
            table[of] = side[where, : self._width]
        return at[slots]

    def _sides(self) -> tuple[Tensor, Tensor]:
        """What the exchange leaves out of what is given and of what is served, a row a slot: to be read and written."""
        errors, wide = self._memory.errors(), round_up(self._width, BYTE)
        return errors.worker[0].view(-1, wide), errors.server[0].view(-1, wide)

    def _fit(self, needed: int) -> None:
        """Have an exchange of so many rows a rank, or of up to a quarter more. Collective where it is another one."""
        grain = 1 << max(needed.bit_length() - 3, 0)
        slots = -(-needed // grain) * grain
        if slots == self._slots:
            return
        wide = round_up(self._width, BYTE)
        numel, like = self._group.size * slots * wide, self.m_VD.view(-1)
        self._reduce = default_reducer(
            self._group, VectorLayout.single(numel), like, codec=Int8Codec(wide), bucket_elements=numel
        )
        self._memory, self._slots = self._reduce.new_memory(), slots


def gathered(group: Group, x: Tensor) -> Tensor:
    """x of every rank, which are of one length: [n, length]. Collective. Raises: PeerLost."""
    x_B = x.contiguous().view(torch.uint8)
    out_nB = x_B.new_empty(group.size, len(x_B))
    if len(x_B):
        group.all_gather(out_nB, x_B)
    return out_nB.view(-1).view(x.dtype).view(group.size, -1)


def _check_group(group: dict[str, Any]) -> None:
    """Refuse hyperparameters out of range. Raises: ValueError."""
    check_group(group, (LR, EPS))


def _matrices(what: str, found: Mapping[str, Any], shape: list[int]) -> Iterator[Row]:
    for name in VECTORS:
        x = found[name]
        fits = isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided and not x.is_meta
        fits = fits and list(x.shape) == shape
        yield f"{what}[{name!r}]", x, fits, f"needed are dense floats of shape {shape}: it is of another model"
    damaged = int((~(found["v"] >= 0)).count_nonzero())
    why = "as no mean of squares is. It is damaged; load another file"
    yield f"{what}['v'] with {damaged} values that are NaN or below 0", ABSENT, not damaged, why


def _refuse_faults(counts_nT: Sequence[Sequence[int]]) -> None:
    """Raises: ValueError, NonFiniteInput for what some rank has in the place of a count."""
    dense, bad = ([rank for rank, one in enumerate(counts_nT) if fault in one] for fault in (DENSE, NOT_FINITE))
    if dense:
        raise ValueError(
            f"ranks {dense} gave SparseAdam a gradient that is dense: it takes those of "
            "nn.Embedding(..., sparse=True) and EmbeddingBag(..., sparse=True); give other parameters to OneBitAdam"
        )
    if bad:
        raise NonFiniteInput(f"a sparse gradient of ranks {bad} holds NaN or infinity", tuple(bad))
