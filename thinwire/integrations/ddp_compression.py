"""A communication hook for DistributedDataParallel: gradients at one bit a value, for any optimizer of torch.

This is error feedback on *gradients*, as EF-SGD has it [Karimireddy et al. 2019, arXiv:1901.09847], in the two-phase
exchange of Tang et al. 2021. It is not 1-bit Adam: an Adam behind it would build its variance from compressed
gradients, which are all of one size within a block. It fits SGD with momentum; docs/integrations.md has figures.

    backward     |... bucket 0 ...|... bucket 1 ...|... last bucket |
    hook, l2     copy, encode, send   copy, encode, send   copy, encode, send; wait for all; decode; copy back
    hook, l1     copy                 copy                 copy; encode, send all; wait; decode; copy back

DDP's buckets lie in a flat vector of ours, the first one at its end, every tensor from a multiple of 8 on. So each
matrix has scales of its own, as under Thinwire's optimizers, and one exchange has one order on all ranks.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the classes themselves.

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.codecs import SignCodec
from thinwire.comm.default import default_reducer
from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.kernels.reference import Scale
from thinwire.comm.layout import BYTE, DEFAULT_BLOCK, VectorLayout, round_up
from thinwire.comm.protocol import Pending
from thinwire.integrations.ddp import MARK, OfThisReducer, refuse_no_ddp, refuse_unfit, register

logger = logging.getLogger(__name__)

LEAST_WARMUP = 2
"""DDP puts its buckets in order after the first backward; the second shows them as they stay."""


def compress_gradients(
    ddp_model: DistributedDataParallel,
    *,
    warmup: int = LEAST_WARMUP,
    block: int = DEFAULT_BLOCK,
    scale: Scale = "l1",
) -> "CompressedGradients":
    """Let DDP average gradients at one bit a value from here on. Returns what counts and shows it.

    warmup: backward passes that are averaged in full first, at least 2. block: values that share a scale. scale: the
    norm that it keeps. "l1" leaves out less than it is given, which is what the theory of EF-SGD asks for; "l2" may
    leave out more, is exchanged bucket by bucket while backward runs, and wants smaller steps. All the same on every
    rank. Call it on every rank before the first backward; the exchange is laid out after the warm-up, a collective call
    inside backward. Modifies ddp_model: its communication hook, and its mark `thinwire_gradients`.

    Raises: TypeError for what is no DDP model; ValueError for one with another hook, or with parameters that this
    cannot serve. In backward: PeerLost, WireMismatch; RuntimeError where DDP lays out its buckets anew.
    """
    refuse_no_ddp(ddp_model)
    if type(warmup) is not int or warmup < LEAST_WARMUP:
        raise ValueError(
            f"warmup = {warmup!r}: must be a whole number of backward passes, at least {LEAST_WARMUP}: DDP puts its "
            "buckets in their final order after the first"
        )
    if type(block) is not int or block < BYTE or block % BYTE:
        raise ValueError(f"block = {block!r}: must be a positive multiple of {BYTE}")
    if scale not in ("l1", "l2"):
        raise ValueError(f'scale = {scale!r}: must be "l1" or "l2"')
    refuse_unfit(ddp_model)
    _refuse_uncompressible(ddp_model)
    state = CompressedGradients(TorchGroup(ddp_model.process_group), warmup, block, scale)
    register(ddp_model, state, average_compressed)
    setattr(ddp_model, MARK, OfThisReducer("compressed"))
    return state


def average_compressed(
    state: "CompressedGradients",
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook: starts the exchange of one bucket; with the last bucket all of them are there."""
    return state.exchange(bucket)


@dataclass(slots=True)
class _Taken:
    """A bucket of DDP's in this backward: its memory, its gradients in it, and the future that waits for it."""

    buffer: Tensor
    gradients: list[Tensor]
    parameters: list[Tensor]
    future: "torch.futures.Future[Tensor]"
    pending: Pending | None = None


class CompressedGradients:
    """The exchange of one DDP model's gradients, and its error memory, which is of this process alone: see the docs.

    num_backwards: passes that were averaged. error_N: this rank's error memory as one vector, None in the warm-up; to
    look at.
    """

    def __init__(self, group: TorchGroup, warmup: int, block: int, scale: Scale) -> None:
        self.num_backwards = 0
        self._group, self._warmup = group, warmup
        self._block, self._scale = block, scale
        self._taken: list[_Taken] = []
        self._packed: _Packed | None = None
        self._launched = 0

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the model has a reducer without the hook, and nothing of this."""
        return type(None), ()

    def stats(self) -> dict[str, Any]:
        """Numbers for people: backward passes, whether the next is compressed, bytes sent by this rank."""
        return {
            "num_backwards": self.num_backwards,
            "phase": "warmup" if self._packed is None else "compressed",
            "sent_bytes": self._group.stats.sent_bytes,
        }

    @property
    def error_N(self) -> Tensor | None:
        """What this rank's compression has left out and adds to the next gradient. A copy; None in the warm-up."""
        return None if self._packed is None else self._packed.memory.worker_N.clone()

    def exchange(self, bucket: Any) -> "torch.futures.Future[Tensor]":
        """Start the exchange of DDP's next bucket. With the last of a backward it waits for all. Raises: PeerLost."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        taken = _Taken(bucket.buffer(), bucket.gradients(), bucket.parameters(), future)
        if bucket.index() == 0:
            self._taken, self._launched = [], 0
            if self._packed is not None:
                self._packed.reduce.begin(self._packed.memory)
        self._taken.append(taken)
        if self._packed is None:
            taken.pending = self._group.start_sum_(taken.buffer.div_(self._group.size))
        else:
            self._launched = self._packed.launch(bucket.index(), taken.parameters, taken.gradients, self._launched)
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        taken, self._taken = self._taken, []
        if self._packed is None:
            for one in taken:
                assert one.pending is not None
                one.pending.wait()
        else:
            self._packed.finish([one.gradients for one in taken])
        self.num_backwards += 1
        if self.num_backwards == self._warmup:
            self._packed = _Packed(self._group, [one.parameters for one in taken], self._block, self._scale)
        for one in taken:
            one.future.set_result(one.buffer)


class _Packed:
    """DDP's buckets as one flat vector, its exchange and error memory. buckets: the parameters of each, in DDP's order.

    Collective. Raises: WireMismatch, PeerLost.
    """

    def __init__(self, group: TorchGroup, buckets: Sequence[Sequence[Tensor]], block: int, scale: Scale) -> None:
        places: dict[int, tuple[int, int]] = {}
        live: list[tuple[int, int]] = []
        segments: list[tuple[int, int]] = []
        self._starts = [0] * len(buckets)
        at = 0
        for k in reversed(range(len(buckets))):  # sent from the end of the vector to its start
            start = self._starts[k] = at
            for param in sorted(buckets[k], key=_is_matrix):  # stable: vectors, which share scales, then matrices
                stop = round_up(at + param.numel(), BYTE)
                joins = not _is_matrix(param) and at > start
                segments.append((segments.pop()[0] if joins else at, stop))
                live.append((at, at + param.numel()))
                places[id(param)] = live[-1]
                at = stop
        self._parameters = [[id(param) for param in bucket] for bucket in buckets]
        dtypes = {param.dtype for bucket in buckets for param in bucket}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._x_N = torch.zeros(at, dtype=dtype, device=buckets[0][0].device)
        self._views = [
            [self._x_N[slice(*places[id(param)])].view(param.shape) for param in bucket] for bucket in buckets
        ]
        layout = VectorLayout(at, tuple(live), tuple(segments))
        self.reduce = default_reducer(group, layout, self._x_N, codec=SignCodec(block, scale), cuts=self._starts)
        self.memory = self.reduce.new_memory()

    def launch(self, index: int, parameters: Sequence[Tensor], gradients: list[Tensor], launched: int) -> int:
        """Send DDP's bucket of that number. Returns how many of our buckets are launched by now."""
        if index >= len(self._parameters) or [id(param) for param in parameters] != self._parameters[index]:
            raise RuntimeError(
                f"DDP has laid out its buckets anew (bucket {index} has {len(parameters)} other parameters than in the "
                "warm-up), and the error memory is of the old ones: wrap the model anew, call compress_gradients again"
            )
        torch._foreach_copy_(self._views[index], gradients)
        spans = self.reduce.buckets.spans
        while launched < len(spans) and spans[launched][0] >= self._starts[index]:
            self.reduce.launch_sum(launched, self._x_N)
            launched += 1
        return launched

    def finish(self, gradients: Sequence[list[Tensor]]) -> None:
        """Wait for all, and write the means into DDP's buckets: NaN everywhere where a rank's gradient is not finite.

        That is what DDP's own mean would spread, so that a GradScaler leaves the step out on every rank; error memory
        is then as before.
        """
        try:
            self.reduce.finish()
        except NonFiniteInput as error:
            logger.warning("gradient_not_finite ranks=%s", list(error.ranks))
            for of_bucket in gradients:
                torch._foreach_mul_(of_bucket, torch.nan)
            return
        self.reduce.result.decode_(self._x_N)
        self.reduce.commit()
        for of_bucket, views in zip(gradients, self._views, strict=True):
            torch._foreach_copy_(of_bucket, views)


def _is_matrix(param: Tensor) -> bool:
    return param.dim() >= 2


def _refuse_uncompressible(ddp_model: DistributedDataParallel) -> None:
    params = [(name, param) for name, param in ddp_model.module.named_parameters() if param.requires_grad]
    for name, param in params:
        if param.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise ValueError(
                f"{name} is {param.dtype}: must be float32, float64 or bfloat16. Gradients in float16 carry a loss "
                "scale, and error memory would mix gradients of several scales"
            )
    devices = {param.device for _, param in params}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on {len(devices)} devices, {sorted(map(str, devices))}: must be on one")
