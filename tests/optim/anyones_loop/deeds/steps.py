"""How a step is written: accumulation, several losses, closures, precision, checkpointing, compilation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.optim.anyones_loop.deed import Raises, When, deed
from tests.optim.anyones_loop.loop import Loop, plain

STEPS = "How a step is written"
SECOND = Raises("a second backward reached it before step()", "optimizer.no_sync()", overlap=True)


def _no_sync(loop: Loop) -> Any:
    return loop.optimizer.no_sync() if hasattr(loop.optimizer, "no_sync") else nullcontext()


def _halves(loop: Loop) -> list[Tensor]:
    x, y = loop.inputs()
    return [F.mse_loss(loop.model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]


@deed(STEPS, "gradients of two micro-batches added up", SECOND)
def accumulated(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        for loss in _halves(loop):
            loss.backward()
        loop.optimizer.step()

    loop.iterate = iterate


@deed(STEPS, "the same inside `optimizer.no_sync()`")
def accumulated_inside_no_sync(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        first, last = _halves(loop)
        with _no_sync(loop):
            first.backward()
        last.backward()
        loop.optimizer.step()

    loop.iterate = iterate


@deed(STEPS, "two losses, each with a backward, `retain_graph=True`", SECOND)
def two_losses(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        x, y = loop.inputs()
        loop.optimizer.zero_grad()
        out = loop.model(x)
        (F.mse_loss(out, y) / 2).backward(retain_graph=True)
        (F.mse_loss(out, y) / 2).backward()
        loop.optimizer.step()

    loop.iterate = iterate


@deed(STEPS, "one backward of a sum of losses")
def sum_of_losses(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        torch.autograd.backward(_halves(loop))
        loop.optimizer.step()

    loop.iterate = iterate


@deed(STEPS, "`backward(inputs=...)`, layer by layer")
def backward_in_parts(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        params = list(loop.net.parameters())
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward(retain_graph=True, inputs=params[4:])
        loss.backward(inputs=params[:4])
        loop.optimizer.step()

    loop.iterate = iterate


@deed(STEPS, "`optimizer.step(closure)`")
def with_a_closure(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            loss = loop.loss()
            loss.backward()
            return loss

        loop.optimizer.step(closure)

    loop.iterate = iterate


@deed(STEPS, "`torch.autocast` with bfloat16")
def autocast(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loop.loss()
        loss.backward()
        loop.optimizer.step()

    loop.iterate = iterate


def _scaling(loop: Loop, *, clips: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss()).backward()
        if clips:
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.net.parameters(), 0.3)
        scaler.step(loop.optimizer)
        scaler.update()

    loop.iterate = iterate


STARTED = Raises(
    "a GradScaler calls step() for the first time after gradients have been sent",
    "call zero_grad() and go on",
    overlap=True,
    when=(When.WARMUP, When.COMPRESSED),
    optimizers=("adam", "lamb", "sgd", "onebit_adam", "onebit_lamb"),
)


STARTED_IN_SYNCS = replace(STARTED, when=(When.COMPRESSED,), optimizers=("zero_one_adam",))


@deed(STEPS, "`torch.amp.GradScaler`", STARTED, STARTED_IN_SYNCS)
def loss_scaled(loop: Loop) -> None:
    _scaling(loop, clips=False)


@deed(STEPS, "`torch.amp.GradScaler`, `unscale_`, `clip_grad_norm_`", STARTED, STARTED_IN_SYNCS)
def loss_scaled_and_clipped(loop: Loop) -> None:
    _scaling(loop, clips=True)


def _checkpointing(loop: Loop, *, reentrant: bool) -> None:
    net: Any = loop.net
    middle = net.middle
    net.middle = lambda x: checkpoint(middle, x, use_reentrant=reentrant)


@deed(STEPS, "`checkpoint(..., use_reentrant=False)`")
def checkpointed(loop: Loop) -> None:
    _checkpointing(loop, reentrant=False)


@deed(STEPS, "`checkpoint(..., use_reentrant=True)`, each layer once")
def checkpointed_reentrantly(loop: Loop) -> None:
    _checkpointing(loop, reentrant=True)


@deed(
    STEPS,
    "`checkpoint(..., use_reentrant=True)`, a layer twice",
    Raises("a second backward reached it before step()", "reentrant checkpointing needs overlap=False", overlap=True),
)
def checkpointed_reentrantly_twice(loop: Loop) -> None:
    net: Any = loop.net
    middle = net.middle
    net.middle = lambda x: checkpoint(middle, checkpoint(middle, x, use_reentrant=True), use_reentrant=True)


@deed(STEPS, "`torch.func.functional_call(model, dict(model.named_parameters()), x)`")
def called_functionally(loop: Loop) -> None:
    loop.model = lambda x: torch.func.functional_call(loop.net, dict(loop.net.named_parameters()), (x,))


@deed(STEPS, "`nn.DataParallel(model)`")
def in_data_parallel(loop: Loop) -> None:
    loop.model = nn.DataParallel(loop.net)


@deed(STEPS, "`torch.autograd.graph.save_on_cpu()`")
def saved_on_cpu(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        with torch.autograd.graph.save_on_cpu():
            plain(loop)

    loop.iterate = iterate


@deed(STEPS, "`torch.autograd.set_detect_anomaly`", apart=True)  # of the whole process: threads would leave it on
def with_anomalies_looked_for(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        with torch.autograd.set_detect_anomaly(True):  # type: ignore[no-untyped-call]
            plain(loop)

    loop.iterate = iterate


@deed(STEPS, "evaluation under `torch.inference_mode()` between steps")
def evaluated_in_inference_mode(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        plain(loop)
        loop.net.eval()
        with torch.inference_mode():
            loop.loss()
        loop.net.train()

    loop.iterate = iterate


@deed(STEPS, "`torch.compile(model)`", when=tuple(When), apart=True, slow=True)
def compiled(loop: Loop) -> None:
    loop.model = torch.compile(loop.net, backend="aot_eager")


@deed(STEPS, "`model.compile()`", apart=True)
def compiled_in_place(loop: Loop) -> None:
    loop.net.compile(backend="eager")


@deed(STEPS, "`torch.compile(model)`, whose wrapper is kept and looked at", apart=True, slow=True)
def compiled_and_kept(loop: Loop) -> None:
    loop.net = loop.model = torch.compile(loop.net, backend="eager")  # type: ignore[assignment]


@deed(STEPS, '`torch.compile(model)` with the "inductor" backend', apart=True, slow=True)
def compiled_by_inductor(loop: Loop) -> None:
    loop.model = torch.compile(loop.net)


@deed(STEPS, "`torch.compile(optimizer.step)`", apart=True, slow=True, differs="the step itself is not compiled")
def step_compiled(loop: Loop) -> None:
    step = torch.compile(loop.optimizer.step, backend="eager")

    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        loop.loss().backward()
        step()

    loop.iterate = iterate


@deed(STEPS, "the whole step compiled", apart=True, slow=True, differs="the optimizer itself is not compiled")
def whole_step_compiled(loop: Loop) -> None:
    def once(x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        F.mse_loss(loop.model(x), y).backward()
        loop.optimizer.step()

    whole = torch.compile(once, backend="eager")
    loop.iterate = lambda loop: whole(*loop.inputs())
