"""One line for Hugging Face Accelerate: its loop stays, gradients stay on their rank, the optimizer sends.

    accelerator = with_thinwire(Accelerator(...))
    optimizer = OneBitAdam(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Accelerate would put DistributedDataParallel around the model, which sends every gradient in full. Here nothing is put
around it: `prepare` moves it, sets autocast up and compiles it, as always. What the wrapper did beside averaging is
done here: what no optimizer trains (frozen parameters, a teacher, buffers) is sent from rank 0 once, and ends of
accumulation are passed to optimizers that send during backward. Accelerate itself is imported inside the functions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.default import given_or_default
from thinwire.integrations.shares import own_state, write_share
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.options import reader_of_gradients
from thinwire.optim.engine.parameters import refuse_other_models, send_values_

logger = logging.getLogger(__name__)

SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""Accelerate's distributed types whose parameters or steps are another engine's."""


def with_thinwire(accelerator: Any) -> Any:
    """The same accelerator; what it prepares from here on keeps its gradients on the rank. Call it before prepare().

    All optimizers that are prepared must be of thinwire.optim, for another would train each rank by itself. Every rank
    alike. Modifies the accelerator. Raises: TypeError for anything but an Accelerator; ValueError for one that has
    prepared something, or that shards a model.
    """
    from accelerate import Accelerator

    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"with_thinwire() of thinwire.integrations.accelerate received {type(accelerator).__name__}: give it an "
            "accelerate.Accelerator; for a transformers.Trainer there is thinwire.integrations.transformers"
        )
    if not isinstance(accelerator, LocalGradients) and (accelerator._models or accelerator._optimizers):
        raise ValueError(
            f"this Accelerator has prepared {len(accelerator._models)} models and {len(accelerator._optimizers)} "
            "optimizers: call with_thinwire(accelerator) before accelerator.prepare(...)"
        )
    return leave_unwrapped(accelerator)


def leave_unwrapped(accelerator: Any) -> Any:
    """As with_thinwire, for one that may have prepared a model to evaluate it. Raises: ValueError."""
    if isinstance(accelerator, LocalGradients):
        return accelerator
    _refuse_other_engines(accelerator)
    _watch_local_sgd()
    mixed(accelerator, LocalGradients)
    accelerator.register_save_state_pre_hook(accelerator._save_shares)
    accelerator.register_load_state_pre_hook(accelerator._find_shares)
    return accelerator


@functools.cache
def _watch_local_sgd() -> None:
    """Let LocalSGD refuse accelerators of with_thinwire: it asks for no method of theirs before it has begun."""
    from accelerate.local_sgd import LocalSGD

    enter = LocalSGD.__enter__

    @functools.wraps(enter)
    def begin(local: Any) -> Any:
        if local.enabled and isinstance(local.accelerator, LocalGradients):
            raise ValueError(
                f"LocalSGD(local_sgd_steps={local.local_sgd_steps}) averages parameters that each rank has moved "
                "alone, and an optimizer of thinwire.optim moves those of all ranks together: leave it out. "
                "LocalSteps(torch.optim.AdamW(...), every=N) does what it does, in one bit a value, and ZeroOneAdam "
                "takes local steps by itself"
            )
        return enter(local)

    LocalSGD.__enter__ = begin


def mixed(thing: Any, mixin: type) -> Any:
    """The same object, whose class is now `mixin` in front of its own, under its name: super() is what it was."""
    own = type(thing)
    named = {"__doc__": own.__doc__, "__module__": own.__module__, "__qualname__": own.__qualname__}
    thing.__class__ = type(own.__name__, (mixin, own), named)
    return thing


@torch.no_grad()
def bring_together(optimizer: FlatOptimizer[Any]) -> None:
    """Let all ranks hold the same parameters. Collective where they do not, as between syncs of 0/1 Adam.

    A round of local steps is ended by its exchange; inner moments stay each rank's own.
    Raises: PeerLost, and NonFiniteInput as prepare_to_save().
    """
    if not optimizer.at_sync:
        optimizer.space.take_changes()
        optimizer.end_round()
    if not optimizer.at_sync:
        optimizer.prepare_to_save()


def own_optimizer(optimizer: Any) -> FlatOptimizer[Any] | None:
    """The optimizer of thinwire.optim in Accelerate's wrappers; None where another one is."""
    while not isinstance(optimizer, FlatOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, FlatOptimizer) else None


class StepsTogether:
    """Mixed into accelerate's AcceleratedOptimizer: reports a step that was left out, and clips the mean."""

    optimizer: FlatOptimizer[Any]
    gradient_state: Any

    clip_next: float | None = None
    """max_grad_norm of the next step alone; None: the optimizer's own."""
    collected: dict[str, Any] | None = None
    """What state_dict() gives while a checkpoint is written: all ranks have made it, and one of them writes it."""
    file: Path | None = None
    """Of a checkpoint that is being loaded: beside it may be this rank's share."""

    def step(self, closure: Any = None) -> None:
        """As AcceleratedOptimizer.step. Whether the step was left out is known afterwards, with or without a scaler."""
        if not self.gradient_state.sync_gradients:
            return
        optimizer = self.optimizer
        skipped, bound = optimizer.steps_skipped, optimizer.max_grad_norm
        if self.clip_next is not None:
            optimizer.max_grad_norm, self.clip_next = self.clip_next, None
        try:
            super().step(closure)  # type: ignore[misc]
        finally:
            optimizer.max_grad_norm = bound
        # Accelerate asks whether step() was called, and a scaler always calls ours: ranks leave a step out together.
        self._is_overflow = optimizer.steps_skipped > skipped

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer: collective, unless a checkpoint is being written."""
        return self.optimizer.state_dict() if self.collected is None else self.collected

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of the optimizer; of a checkpoint with shares this rank's own."""
        if self.file is not None:
            state_dict = own_state(self.file, state_dict, self.optimizer)
        self.optimizer.load_state_dict(state_dict)


class LocalGradients:
    """Mixed into accelerate.Accelerator: models are not wrapped, and optimizers of thinwire.optim do the sending."""

    _models: list[Any]
    _optimizers: list[Any]
    num_processes: int
    _given: tuple[FlatOptimizer[Any], ...] = ()
    """Optimizers that are being prepared, perhaps after their models."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator.prepare, without DistributedDataParallel. Collective, where a model is among them."""
        ours = (own_optimizer(thing) for thing in args if isinstance(thing, torch.optim.Optimizer))
        self._given = tuple(optimizer for optimizer in ours if optimizer is not None)
        try:
            return super().prepare(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._given = ()

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: Any = False) -> Any:
        """As Accelerator.prepare_model, without DistributedDataParallel. Collective: sends what nobody trains."""
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "prepare() received a model in DistributedDataParallel, which sends every gradient in full: give it "
                "the model itself"
            )
        # Accelerate's own name for "do not wrap": device, autocast and torch.compile are the same.
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)  # type: ignore[misc]
        if not evaluation_mode:
            optimizers = (*self._given, *(one.optimizer for one in self._optimizers))
            reader = reader_of_gradients(prepared)
            for optimizer in optimizers if reader is not None else ():
                optimizer.reader = reader
            trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            send_untrained(prepared, trained)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """As Accelerator.prepare_optimizer, for optimizers of thinwire.optim. Raises: ValueError for another one."""
        ours = own_optimizer(optimizer)
        if ours is None:
            raise ValueError(
                f"prepare() received {type(optimizer).__name__}, and this Accelerator keeps gradients on their rank: "
                "each would train by itself: use an optimizer of thinwire.optim (Adam is AdamW, uncompressed), or "
                "prepare it with an Accelerator of its own, without with_thinwire"
            )
        refuse_other_ranks(ours, self.num_processes)
        # Without placement: it would load the state back that it takes, and state_dict() is collective.
        prepared = super().prepare_optimizer(optimizer, device_placement=False)  # type: ignore[misc]
        return prepared if isinstance(prepared, StepsTogether) else mixed(prepared, StepsTogether)

    def backward(self, loss: Any, **kwargs: Any) -> Any:
        """As Accelerator.backward. Raises: ValueError where it makes gradients that nobody will bring together."""
        found = super().backward(loss, **kwargs)  # type: ignore[misc]
        self._refuse_lonely_models()
        return found

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Inside, a backward only adds to gradients: an optimizer with overlap sends nothing."""
        with ExitStack() as stack:
            for prepared in self._optimizers:
                stack.enter_context(prepared.optimizer.no_sync())
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The next step clips to this norm, the mean gradient where it is exchanged in full (CheckedOptions).

        Returns the norm of this rank's own gradient, which is not shortened here. Raises: ValueError for other norms,
        for a part of an optimizer's parameters, and with overlap.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        prepared = self._clipped(given, norm_type)
        if prepared is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[misc, no-any-return]
        if not max_norm > 0:
            raise ValueError(f"clip_grad_norm_: max_norm = {max_norm!r}: must be above 0")
        if prepared.optimizer.overlaps:
            raise ValueError(
                f"clip_grad_norm_(..., {max_norm}) with overlap: gradients are on their way already. Give the "
                f"optimizer max_grad_norm={max_norm} and leave this line out"
            )
        self.unscale_gradients(prepared)  # type: ignore[attr-defined]
        if max_norm != float("inf"):
            prepared.clip_next = float(max_norm)
        return torch.nn.utils.get_total_norm([param.grad for param in given if param.grad is not None])

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refused: it would clip this rank's own gradient. Raises: ValueError."""
        raise ValueError(
            f"clip_grad_value_(..., {clip_value}) would clip this rank's own gradient, and not the mean as under "
            "DistributedDataParallel: use accelerator.clip_grad_norm_, or max_grad_norm of the optimizer"
        )

    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> Any:
        """Refused on several ranks: it is DistributedDataParallel that would answer for a rank. Raises: ValueError."""
        if self.num_processes > 1:
            raise ValueError(
                "join_uneven_inputs: a rank without data would leave its peers waiting in step(). Let each rank have "
                "as many batches: DataLoaderConfiguration(even_batches=True), the default, or drop_last=True"
            )
        return super().join_uneven_inputs(joinables, even_batches=even_batches)  # type: ignore[misc]

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerator.save_state, of parameters that all ranks share. Collective."""
        for prepared in self._optimizers:
            bring_together(prepared.optimizer)
        return super().save_state(*args, **kwargs)  # type: ignore[misc]

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As Accelerator.load_state; each rank its own share where there are some (thinwire.integrations.shares)."""
        try:
            super().load_state(*args, **kwargs)  # type: ignore[misc]
        finally:
            for prepared in self._optimizers:
                prepared.file = None

    def _save_shares(self, models: Any, weights: Any, folder: str) -> None:
        """Called by save_state() with the folder that it writes to."""
        for index, prepared in enumerate(self._optimizers):
            write_share(Path(folder, _file_name(index)), prepared.optimizer)

    def _find_shares(self, models: Any, folder: str) -> None:
        """Called by load_state() with the folder that it reads."""
        for index, prepared in enumerate(self._optimizers):
            prepared.file = Path(folder, _file_name(index))

    def _clipped(self, given: list[Tensor], norm_type: float) -> Any:
        """The prepared optimizer that steps these parameters; None where none of ours has any of them."""
        ids = {id(param) for param in given}
        found = []
        for prepared in self._optimizers:
            own = [param for group in prepared.optimizer.param_groups for param in group["params"]]
            missing = [param for param in own if id(param) not in ids]
            if len(missing) == len(own):
                continue
            if missing:
                raise ValueError(
                    f"clip_grad_norm_ received {len(own) - len(missing)} of the {len(own)} parameters of "
                    f"{type(prepared.optimizer).__name__}, which clips all of them together: give it all"
                )
            found.append(prepared)
        if not found:
            return None
        if len(found) > 1:
            raise ValueError(
                f"clip_grad_norm_ received the parameters of {len(found)} optimizers, and each clips its own: call it "
                "once for each"
            )
        if norm_type != 2:
            raise ValueError(
                f"clip_grad_norm_: norm_type = {norm_type!r}: the mean gradient is clipped by its 2-norm: 2"
            )
        return found[0]

    def _refuse_lonely_models(self) -> None:
        """Raises: ValueError for a model with gradients, none of whose parameters an optimizer here holds."""
        models = [model for model in self._models if not getattr(model, "_thinwire_is_stepped", False)]
        if not models:
            return
        held = {id(p) for prepared in self._optimizers for group in prepared.param_groups for p in group["params"]}
        for model in models:
            trained = [param for param in model.parameters() if param.grad is not None]
            if not trained:
                continue
            if not any(id(param) in held for param in trained):
                raise ValueError(
                    f"{type(model).__name__} has gradients, and no prepared optimizer holds its parameters: with "
                    "with_thinwire gradients stay on their rank, so that each would train by itself. Prepare its "
                    "optimizer of thinwire.optim: accelerator.prepare(model, optimizer)"
                )
            model._thinwire_is_stepped = True


@torch.no_grad()
def send_untrained(model: torch.nn.Module, trained: Sequence[Tensor]) -> None:
    """Parameters and buffers <- rank 0's, as DistributedDataParallel does once. Collective.

    trained: parameters of optimizers, whose constructors have sent them. What the model excepts
    (_ddp_params_and_buffers_to_ignore) stays. Raises: PeerLost; WireMismatch where ranks have other ones.
    """
    group = given_or_default(None)
    if group.size == 1:
        return
    excepted = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    held = {id(param) for param in trained if param.requires_grad}
    everything = (*model.named_parameters(), *model.named_buffers())
    sent = [(name, x) for name, x in everything if name not in excepted and id(x) not in held and x.numel()]
    words = [f"{name}, {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in sent]
    device = everything[0][1].device if everything else torch.device("cpu")
    refuse_other_models(group, "prepare()", [f"{type(model).__name__}, what no optimizer sends", *words], device)
    for _, tensor in sent:
        send_values_(group, tensor, device)


def refuse_other_ranks(optimizer: FlatOptimizer[Any], num_processes: int) -> None:
    """Raises: ValueError where the optimizer exchanges with another number of ranks than the accelerator has."""
    if optimizer.group.size != num_processes:
        raise ValueError(
            f"the Accelerator has {num_processes} processes, and {type(optimizer).__name__} exchanges with "
            f"{optimizer.group.size}: make the Accelerator (or TrainingArguments) first, which joins the processes, "
            "then the optimizer; on CPUs say cpu=True (use_cpu=True)"
        )


def _file_name(index: int) -> str:
    """What Accelerate calls the file of an optimizer."""
    return f"optimizer_{index}.bin" if index else "optimizer.bin"


def _refuse_other_engines(accelerator: Any) -> None:
    """Raises: ValueError for whatever shards parameters or steps them in its own way."""
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind in SHARDED:
        raise ValueError(
            f"this Accelerator is of type {kind}, which shards or steps the model itself: leave that plugin (and its "
            "lines of `accelerate config`) out; thinwire is for models that are whole on every rank"
        )
    config = getattr(accelerator, "parallelism_config", None)
    if config is not None and config.total_size != config.dp_replicate_size:
        raise ValueError(
            f"this Accelerator has {config}: only dp_replicate_size can be above 1, as each rank has the whole model"
        )
    if accelerator.mixed_precision == "fp8":
        raise ValueError('mixed_precision = "fp8" puts other modules into the model: use "bf16", "fp16" or "no"')
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if getattr(hook, "value", "no") != "no":
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={hook.value!r}): with with_thinwire there is no "  # type: ignore[union-attr]
            "DistributedDataParallel whose hook could be called: leave it out"
        )
