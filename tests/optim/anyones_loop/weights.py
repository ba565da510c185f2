"""Weights written, swapped, averaged, copied, saved and loaded."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # registers what its queues do to tensors
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.optim.anyones_loop.cases import BETWEEN_SYNCS, Raises, case, each_step
from tests.optim.anyones_loop.loop import plain
from tests.optim.anyones_loop.memory import initialised
from tests.optim.seeded import seeded

WEIGHTS = "Weights: written, swapped, averaged"
COPIES = "Copies, files and other processes"
NOT_THESE = Raises("nothing but this optimizer holds it any more", "make the optimizer")
AT_SYNC = "of `ZeroOneAdam` the parameters where `optimizer.at_sync`, or after `prepare_to_save()`"
COPY = Raises("cannot be copied or pickled", "Keep state_dict(), and load it")


def _settle(loop):
    """Bring the ranks of 0/1 Adam together; with all others they are."""
    if hasattr(loop.optimizer, "prepare_to_save"):
        loop.optimizer.prepare_to_save()


def _values(net):
    return [param.detach().clone() for param in net.parameters()]


def _other(loop):
    """State for load_state_dict."""
    return {name: value * 0.9 for name, value in loop.net.state_dict().items()}


def _set_data(loop, values):
    for param, value in zip(loop.net.parameters(), values, strict=True):
        param.data = value


def _through_a_file(found, **how):
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, **how)


def _copy_in(loop, values):
    with torch.no_grad():
        for param, value in zip(loop.net.parameters(), values, strict=True):
            param.copy_(value)


@case(WEIGHTS, "`p.mul_(0.9)` under `torch.no_grad()`", BETWEEN_SYNCS)
def written_in_place(loop):
    with torch.no_grad():
        for param in loop.net.parameters():
            param.mul_(0.9)


@case(WEIGHTS, "`p.data.mul_(0.9)`")
def written_through_data(loop):
    for param in loop.net.parameters():
        param.data.mul_(0.9)


case(WEIGHTS, "`p.data = other`", BETWEEN_SYNCS)(lambda loop: _set_data(loop, _other(loop).values()))


@case(WEIGHTS, "`p.data.clamp_(-0.3, 0.3)` after each step")
@each_step
def clamped_after_each_step(loop):
    plain(loop)
    for param in loop.net.parameters():
        param.data.clamp_(-0.3, 0.3)


case(WEIGHTS, "`model.apply(init)`", BETWEEN_SYNCS)(lambda loop: loop.net.apply(initialised))
case(WEIGHTS, "`model.load_state_dict(other)`", BETWEEN_SYNCS)(lambda loop: loop.net.load_state_dict(_other(loop)))
case(WEIGHTS, "`model.load_state_dict(other, assign=True)`", NOT_THESE)(
    lambda loop: loop.net.load_state_dict(_other(loop), assign=True)
)


@case(WEIGHTS, "`model.load_state_dict(other)` under `torch.inference_mode()`", BETWEEN_SYNCS)
def loaded_in_inference_mode(loop):
    with torch.inference_mode():
        loop.net.load_state_dict(_other(loop))


@case(WEIGHTS, "`AveragedModel` (EMA), updated after each step")
def averaged(loop):
    average, by_hand = AveragedModel(loop.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)), []

    def once(loop):
        plain(loop)
        average.update_parameters(loop.net)
        now = _values(loop.net)
        by_hand[:] = [0.9 * a + 0.1 * b for a, b in zip(by_hand or now, now, strict=True)]

    def compare():
        for kept, value in zip(average.module.parameters(), by_hand, strict=True):
            torch.testing.assert_close(kept.detach(), value)

    loop.iterate = once
    loop.at_end.append(compare)


@case(WEIGHTS, "SWA: the average of several steps is trained on", differs=AT_SYNC)
def average_trained_on(loop):
    _settle(loop)
    average, at = AveragedModel(loop.net), loop.step

    def once(loop):
        plain(loop)
        if loop.step <= at + 3 and getattr(loop.optimizer, "at_sync", True):
            average.update_parameters(loop.net)
        if loop.step == at + 3:
            _settle(loop)
            update_bn([], average)
            loop.net.load_state_dict(average.module.state_dict())

    loop.iterate = once


@case(WEIGHTS, "the average swapped in for an evaluation and out again, by `copy_`", BETWEEN_SYNCS)
def swapped_in_and_out(loop):
    own = _values(loop.net)
    _copy_in(loop, _other(loop).values())
    loop.evaluate()
    _copy_in(loop, own)


@case(WEIGHTS, "the average swapped in for an evaluation and out again, by `p.data = ...`")
def swapped_in_and_out_as_memory(loop):
    own = [param.data for param in loop.net.parameters()]
    _set_data(loop, _other(loop).values())
    loop.evaluate()
    _set_data(loop, own)


@case(COPIES, "`copy.deepcopy(model)`, kept beside it")
def copied(loop):
    other, before = copy.deepcopy(loop.net), _values(loop.net)

    def compare():
        for param, value in zip(other.parameters(), before, strict=True):
            assert torch.equal(param, value), "the copy is trained too"

    loop.at_end.append(compare)


@case(COPIES, "`model = copy.deepcopy(model)`, trained on with the old optimizer", NOT_THESE)
def copy_trained_on(loop):
    loop.net = loop.model = copy.deepcopy(loop.net)


@case(COPIES, "`torch.save(model)`, `torch.load`, and trained on with the old optimizer", NOT_THESE)
def file_trained_on(loop):
    loop.net = loop.model = _through_a_file(loop.net, weights_only=False)


@case(COPIES, "`torch.save(model)` beside training")
def saved(loop):
    file, before = io.BytesIO(), _values(loop.net)
    torch.save(loop.net, file)
    loop.train(1)
    file.seek(0)
    for param, value in zip(torch.load(file, weights_only=False).parameters(), before, strict=True):
        assert torch.equal(param, value)


@case(COPIES, "`torch.save(model.state_dict())`, some steps, and loaded again", differs=AT_SYNC)
def saved_and_loaded(loop):
    _settle(loop)
    state = _through_a_file(loop.net.state_dict(), weights_only=True)
    loop.train(1)
    _settle(loop)
    loop.net.load_state_dict(state)


case(COPIES, "`pickle.loads(pickle.dumps(model))`")(lambda loop: pickle.loads(pickle.dumps(loop.net)))
case(COPIES, "`model.state_dict()` through a `torch.multiprocessing` queue")(
    lambda loop: ForkingPickler.dumps(loop.net.state_dict())  # what a queue does to it
)
case(COPIES, "`copy.deepcopy(optimizer)`", COPY)(lambda loop: copy.deepcopy(loop.optimizer))
case(COPIES, "`pickle.dumps(optimizer)`", COPY)(lambda loop: pickle.dumps(loop.optimizer))


@case(COPIES, "`optimizer.state_dict()`, to a file and back into a new optimizer")
def optimizer_saved_and_loaded(loop):
    state = _through_a_file(loop.optimizer.state_dict(), weights_only=True)
    loop.make_optimizer()
    loop.optimizer.load_state_dict(state)


case(
    COPIES,
    "`optimizer.load_state_dict` of a `torch.optim.AdamW`",
    Raises("is of an optimizer of torch.optim", "begin the optimizer anew"),
)(lambda loop: loop.optimizer.load_state_dict(torch.optim.AdamW(seeded(0, type(loop.net)).parameters()).state_dict()))
