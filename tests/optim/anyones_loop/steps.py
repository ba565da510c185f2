"""How a step is written: accumulation, several losses, closures, precision, checkpointing, compilation."""

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.optim.anyones_loop.cases import Raises, When, case, each_step
from tests.optim.anyones_loop.loop import plain

STEPS = "How a step is written"
SECOND = Raises("a second backward reached it before step()", "optimizer.no_sync()", overlap=True)
REENTRANT = replace(SECOND, way="reentrant checkpointing needs overlap=False")
STARTED = Raises(
    "a GradScaler calls step() for the first time after gradients have been sent",
    "call zero_grad() and go on",
    overlap=True,
    when=(When.WARMUP, When.COMPRESSED),
    optimizers=("adam", "lamb", "sgd", "onebit_adam", "onebit_lamb", "onebit_sgd", "onebit_muon"),
)
STARTED_IN_SYNCS = replace(STARTED, when=(When.COMPRESSED,), optimizers=("zero_one_adam",))


def _halves(loop):
    x, y = loop.inputs()
    return [F.mse_loss(loop.model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]


@case(STEPS, "gradients of two micro-batches added up", SECOND)
@each_step
def accumulated(loop):
    loop.optimizer.zero_grad()
    for loss in _halves(loop):
        loss.backward()
    loop.optimizer.step()


@case(STEPS, "the same inside `optimizer.no_sync()`")
@each_step
def accumulated_inside_no_sync(loop):
    loop.optimizer.zero_grad()
    first, last = _halves(loop)
    with loop.optimizer.no_sync() if hasattr(loop.optimizer, "no_sync") else nullcontext():
        first.backward()
    last.backward()
    loop.optimizer.step()


@case(STEPS, "two losses, each with a backward, `retain_graph=True`", SECOND)
@each_step
def two_losses(loop):
    x, y = loop.inputs()
    loop.optimizer.zero_grad()
    out = loop.model(x)
    (F.mse_loss(out, y) / 2).backward(retain_graph=True)
    (F.mse_loss(out, y) / 2).backward()
    loop.optimizer.step()


@case(STEPS, "one backward of a sum of losses")
@each_step
def sum_of_losses(loop):
    loop.optimizer.zero_grad()
    torch.autograd.backward(_halves(loop))
    loop.optimizer.step()


@case(STEPS, "`backward(inputs=...)`, layer by layer", SECOND)
@each_step
def backward_in_parts(loop):
    params = list(loop.net.parameters())
    loop.optimizer.zero_grad()
    loss = loop.loss()
    loss.backward(retain_graph=True, inputs=params[4:])
    loss.backward(inputs=params[:4])
    loop.optimizer.step()


@case(STEPS, "`optimizer.step(closure)`")
@each_step
def with_a_closure(loop):
    def closure():
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    loop.optimizer.step(closure)


@case(STEPS, "`torch.autocast` with bfloat16")
@each_step
def autocast(loop):
    loop.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loop.loss()
    loss.backward()
    loop.optimizer.step()


def _scaling(told, *, clips):
    @case(STEPS, told, STARTED, STARTED_IN_SYNCS)
    def scaled(loop):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def once(loop):
            loop.optimizer.zero_grad()
            scaler.scale(loop.loss()).backward()
            if clips:
                scaler.unscale_(loop.optimizer)
                nn.utils.clip_grad_norm_(loop.net.parameters(), 0.3)
            scaler.step(loop.optimizer)
            scaler.update()

        loop.iterate = once


_scaling("`torch.amp.GradScaler`", clips=False)
_scaling("`torch.amp.GradScaler`, `unscale_`, `clip_grad_norm_`", clips=True)


def _checkpointing(loop, run):
    middle = loop.net.middle
    loop.net.middle = lambda x: run(middle, x)


WITHOUT_RANDOMNESS = {"preserve_rng_state": False}
"""Ranks are threads here. Of two that read torch's generator at once one can hold its lock and wait for the
interpreter, which the other holds and waits for that lock."""


def _reentrant(middle, x):
    return checkpoint(middle, x, use_reentrant=True, **WITHOUT_RANDOMNESS)


case(STEPS, "`checkpoint(..., use_reentrant=False)`")(
    lambda loop: _checkpointing(
        loop, lambda middle, x: checkpoint(middle, x, use_reentrant=False, **WITHOUT_RANDOMNESS)
    )
)
case(STEPS, "`checkpoint(..., use_reentrant=True)`, each layer once")(lambda loop: _checkpointing(loop, _reentrant))
case(STEPS, "`checkpoint(..., use_reentrant=True)`, a layer twice", REENTRANT)(
    lambda loop: _checkpointing(loop, lambda middle, x: _reentrant(middle, _reentrant(middle, x)))
)


@case(STEPS, "`torch.func.functional_call(model, dict(model.named_parameters()), x)`")
def called_functionally(loop):
    loop.model = lambda x: torch.func.functional_call(loop.net, dict(loop.net.named_parameters()), (x,))


@case(STEPS, "`nn.DataParallel(model)`")
def in_data_parallel(loop):
    loop.model = nn.DataParallel(loop.net)


@case(STEPS, "`torch.autograd.graph.save_on_cpu()`")
@each_step
def saved_on_cpu(loop):
    with torch.autograd.graph.save_on_cpu():
        plain(loop)


@case(STEPS, "`torch.autograd.set_detect_anomaly`", apart=True)  # of the whole process: threads would leave it on
@each_step
def with_anomalies_looked_for(loop):
    with torch.autograd.set_detect_anomaly(True):
        plain(loop)


@case(STEPS, "evaluation under `torch.inference_mode()` between steps")
@each_step
def evaluated_in_inference_mode(loop):
    plain(loop)
    loop.net.eval()
    with torch.inference_mode():
        loop.loss()
    loop.net.train()


@case(STEPS, "`torch.compile(model)`", when=tuple(When), apart=True, slow=True)
def compiled(loop):
    loop.model = torch.compile(loop.net, backend="aot_eager")


case(STEPS, "`model.compile()`", apart=True)(lambda loop: loop.net.compile(backend="eager"))


@case(STEPS, "`torch.compile(model)`, whose wrapper is kept and looked at", apart=True, slow=True)
def compiled_and_kept(loop):
    loop.net = loop.model = torch.compile(loop.net, backend="eager")


@case(STEPS, '`torch.compile(model)` with the "inductor" backend', apart=True, slow=True)
def compiled_by_inductor(loop):
    loop.model = torch.compile(loop.net)


@case(STEPS, "`torch.compile(optimizer.step)`", apart=True, slow=True, differs="the step itself is not compiled")
def step_compiled(loop):
    step = torch.compile(loop.optimizer.step, backend="eager")

    def once(loop):
        loop.optimizer.zero_grad()
        loop.loss().backward()
        step()

    loop.iterate = once


@case(STEPS, "the whole step compiled", apart=True, slow=True, differs="the optimizer itself is not compiled")
def whole_step_compiled(loop):
    def once(x, y):
        loop.optimizer.zero_grad()
        F.mse_loss(loop.model(x), y).backward()
        loop.optimizer.step()

    whole = torch.compile(once, backend="eager")
    loop.iterate = lambda loop: whole(*loop.inputs())
