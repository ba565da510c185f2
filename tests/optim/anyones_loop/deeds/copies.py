"""Weights written, swapped, averaged, copied, saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers what its queues do to tensors
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.optim.anyones_loop.deed import BETWEEN_SYNCS, Raises, deed
from tests.optim.anyones_loop.deeds.memory import initialised
from tests.optim.anyones_loop.loop import Loop, plain
from tests.optim.seeded import seeded

WEIGHTS = "Weights: written, swapped, averaged"
COPIES = "Copies, files and other processes"
NOT_THESE = Raises("nothing but this optimizer holds it any more", "make the optimizer")


AT_SYNC = "of `ZeroOneAdam` the parameters where `optimizer.at_sync`, or after `prepare_to_save()`"


def _settle(loop: Loop) -> None:
    """Bring the ranks of 0/1 Adam together; with all others they are."""
    if hasattr(loop.optimizer, "prepare_to_save"):
        loop.optimizer.prepare_to_save()


def _values(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def _other(net: nn.Module) -> list[Tensor]:
    return [value * 0.9 for value in _values(net)]


@deed(WEIGHTS, "`p.mul_(0.9)` under `torch.no_grad()`", BETWEEN_SYNCS)
def written_in_place(loop: Loop) -> None:
    with torch.no_grad():
        for param in loop.net.parameters():
            param.mul_(0.9)


@deed(WEIGHTS, "`p.data.mul_(0.9)`")
def written_through_data(loop: Loop) -> None:
    for param in loop.net.parameters():
        param.data.mul_(0.9)


@deed(WEIGHTS, "`p.data = other`", BETWEEN_SYNCS)
def replaced_by_others(loop: Loop) -> None:
    for param, value in zip(loop.net.parameters(), _other(loop.net), strict=True):
        param.data = value


@deed(WEIGHTS, "`p.data.clamp_(-0.3, 0.3)` after each step")
def clamped_after_each_step(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        plain(loop)
        for param in loop.net.parameters():
            param.data.clamp_(-0.3, 0.3)

    loop.iterate = iterate


@deed(WEIGHTS, "`model.apply(init)`", BETWEEN_SYNCS)
def initialised_again(loop: Loop) -> None:
    loop.net.apply(initialised)


@deed(WEIGHTS, "`model.load_state_dict(other)`", BETWEEN_SYNCS)
def loaded(loop: Loop) -> None:
    loop.net.load_state_dict({name: value * 0.9 for name, value in loop.net.state_dict().items()})


@deed(WEIGHTS, "`model.load_state_dict(other, assign=True)`", NOT_THESE)
def loaded_by_assigning(loop: Loop) -> None:
    other = {name: value * 0.9 for name, value in loop.net.state_dict().items()}
    loop.net.load_state_dict(other, assign=True)


@deed(WEIGHTS, "`model.load_state_dict(other)` under `torch.inference_mode()`", BETWEEN_SYNCS)
def loaded_in_inference_mode(loop: Loop) -> None:
    with torch.inference_mode():
        loop.net.load_state_dict({name: value * 0.9 for name, value in loop.net.state_dict().items()})


@deed(WEIGHTS, "`AveragedModel` (EMA), updated after each step")
def averaged(loop: Loop) -> None:
    average = AveragedModel(loop.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand: list[Tensor] = []

    def iterate(loop: Loop) -> None:
        plain(loop)
        average.update_parameters(loop.net)
        if by_hand:
            by_hand[:] = [0.9 * a + 0.1 * b for a, b in zip(by_hand, _values(loop.net), strict=True)]
        else:
            by_hand[:] = _values(loop.net)

    def compare() -> None:
        for kept, value in zip(average.module.parameters(), by_hand, strict=True):
            torch.testing.assert_close(kept.detach(), value)

    loop.iterate = iterate
    loop.at_end.append(compare)


@deed(WEIGHTS, "SWA: the average of several steps is trained on", differs=AT_SYNC)
def average_trained_on(loop: Loop) -> None:
    _settle(loop)
    average, at = AveragedModel(loop.net), loop.step

    def iterate(loop: Loop) -> None:
        plain(loop)
        if loop.step <= at + 3 and getattr(loop.optimizer, "at_sync", True):
            average.update_parameters(loop.net)
        if loop.step == at + 3:
            _settle(loop)
            update_bn([], average)
            loop.net.load_state_dict(average.module.state_dict())

    loop.iterate = iterate


@deed(WEIGHTS, "the average swapped in for an evaluation and out again, by `copy_`", BETWEEN_SYNCS)
def swapped_in_and_out(loop: Loop) -> None:
    own = _values(loop.net)
    with torch.no_grad():
        for param, value in zip(loop.net.parameters(), _other(loop.net), strict=True):
            param.copy_(value)
        loop.evaluate()
        for param, value in zip(loop.net.parameters(), own, strict=True):
            param.copy_(value)


@deed(WEIGHTS, "the average swapped in for an evaluation and out again, by `p.data = ...`")
def swapped_in_and_out_as_memory(loop: Loop) -> None:
    own = [param.data for param in loop.net.parameters()]
    for param, value in zip(loop.net.parameters(), _other(loop.net), strict=True):
        param.data = value
    loop.evaluate()
    for param, value in zip(loop.net.parameters(), own, strict=True):
        param.data = value


@deed(COPIES, "`copy.deepcopy(model)`, kept beside it")
def copied(loop: Loop) -> None:
    other, before = copy.deepcopy(loop.net), _values(loop.net)

    def compare() -> None:
        for param, value in zip(other.parameters(), before, strict=True):
            assert torch.equal(param, value), "the copy is trained too"

    loop.at_end.append(compare)


@deed(COPIES, "`model = copy.deepcopy(model)`, trained on with the old optimizer", NOT_THESE)
def copy_trained_on(loop: Loop) -> None:
    loop.net = loop.model = copy.deepcopy(loop.net)


@deed(COPIES, "`torch.save(model)`, `torch.load`, and trained on with the old optimizer", NOT_THESE)
def file_trained_on(loop: Loop) -> None:
    file = io.BytesIO()
    torch.save(loop.net, file)
    file.seek(0)
    loop.net = loop.model = torch.load(file, weights_only=False)


@deed(COPIES, "`torch.save(model)` beside training")
def saved(loop: Loop) -> None:
    file, before = io.BytesIO(), _values(loop.net)
    torch.save(loop.net, file)
    loop.train(1)
    file.seek(0)
    for param, value in zip(torch.load(file, weights_only=False).parameters(), before, strict=True):
        assert torch.equal(param, value)


@deed(COPIES, "`torch.save(model.state_dict())`, some steps, and loaded again", differs=AT_SYNC)
def saved_and_loaded(loop: Loop) -> None:
    file = io.BytesIO()
    _settle(loop)
    torch.save(loop.net.state_dict(), file)
    loop.train(1)
    _settle(loop)
    file.seek(0)
    loop.net.load_state_dict(torch.load(file, weights_only=True))


@deed(COPIES, "`pickle.loads(pickle.dumps(model))`")
def pickled(loop: Loop) -> None:
    pickle.loads(pickle.dumps(loop.net))


@deed(COPIES, "`model.state_dict()` through a `torch.multiprocessing` queue")
def sent_to_another_process(loop: Loop) -> None:
    ForkingPickler.dumps(loop.net.state_dict())  # what a queue does to it


COPY = Raises("cannot be copied or pickled", "Keep state_dict(), and load it")


@deed(COPIES, "`copy.deepcopy(optimizer)`", COPY)
def optimizer_copied(loop: Loop) -> None:
    copy.deepcopy(loop.optimizer)


@deed(COPIES, "`pickle.dumps(optimizer)`", COPY)
def optimizer_pickled(loop: Loop) -> None:
    if isinstance(loop.optimizer, torch.optim.AdamW | torch.optim.SGD) and type(loop.optimizer).__name__[:4] == "Mean":
        return  # the measure holds the group of the test
    pickle.dumps(loop.optimizer)


@deed(COPIES, "`optimizer.state_dict()`, to a file and back into a new optimizer")
def optimizer_saved_and_loaded(loop: Loop) -> None:
    file = io.BytesIO()
    torch.save(loop.optimizer.state_dict(), file)
    file.seek(0)
    loop.make_optimizer()
    loop.optimizer.load_state_dict(torch.load(file, weights_only=True))


@deed(
    COPIES,
    "`optimizer.load_state_dict` of a `torch.optim.AdamW`",
    Raises("is of an optimizer of torch.optim", "begin the optimizer anew"),
)
def state_of_adamw_loaded(loop: Loop) -> None:
    net = seeded(0, type(loop.net))
    adamw: Any = type(loop.optimizer) if type(loop.optimizer).__name__ == "MeanAdamW" else torch.optim.AdamW
    if type(loop.optimizer).__name__ == "MeanSGD":
        return
    loop.optimizer.load_state_dict(adamw(net.parameters()).state_dict())
