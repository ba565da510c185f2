"""Gradients set, dropped, clipped and replaced between backward and step(), and hooks on them."""

from dataclasses import replace

import torch
from torch import nn

from tests.optim.anyones_loop.cases import Raises, case, each_gradient, each_step
from tests.optim.anyones_loop.loop import Net, plain

GRADIENTS = "Gradients"
WRITTEN = Raises("gradients were written between backward and step()", "use overlap=False", overlap=True)
PERHAPS_WRITTEN = replace(WRITTEN, perhaps=True)
AS_ZERO = {"none_is_zero": True, "differs": "with a gradient of zero; AdamW leaves the tensor out"}


def _halve(param):
    param.grad.mul_(0.5)


@case(GRADIENTS, "`torch.nn.utils.clip_grad_norm_`, before each step", WRITTEN)
def clipped_by_norm(loop):
    loop.between.append(lambda: nn.utils.clip_grad_norm_(loop.net.parameters(), 0.3))


@case(GRADIENTS, "`torch.nn.utils.clip_grad_value_`, before each step", WRITTEN)
def clipped_by_value(loop):
    loop.between.append(lambda: nn.utils.clip_grad_value_(loop.net.parameters(), 0.01))


case(GRADIENTS, "`p.grad.mul_(0.5)`, before each step", WRITTEN)(each_gradient(_halve))


@case(GRADIENTS, "`p.grad = p.grad * 0.5`, before each step", WRITTEN)
@each_gradient
def scaled_as_others(param):
    param.grad = param.grad * 0.5


@case(GRADIENTS, "`p.grad.data = other`, before each step", WRITTEN)
@each_gradient
def data_replaced(param):
    param.grad.data = param.grad.data * 0.5


case(GRADIENTS, "`p.grad.data.mul_(0.5)`, before each step, without overlap", overlaps=(False,))(
    each_gradient(lambda p: p.grad.data.mul_(0.5))
)
case(GRADIENTS, "one `p.grad.mul_(0.5)`, of one layer, before each step", WRITTEN)(
    each_gradient(_halve, only="second.weight")
)


def _dropping(loop, params):
    at = loop.step + 1

    def drop():
        for param in params if loop.step == at else ():
            param.grad = None

    loop.between.append(drop)


case(GRADIENTS, "`p.grad = None`, of all, for one step", WRITTEN, **AS_ZERO)(
    lambda loop: _dropping(loop, list(loop.net.parameters()))
)
case(GRADIENTS, "`p.grad = None`, of one layer, for one step", WRITTEN, **AS_ZERO)(
    lambda loop: _dropping(loop, [loop.net.second.weight])
)


def _set(loop, turned):
    loop.optimizer.zero_grad()
    params = list(loop.net.parameters())
    for param, grad in zip(params, torch.autograd.grad(loop.loss(), params), strict=True):
        param.grad = grad.t().contiguous().t() if turned and grad.dim() == 2 else grad
    loop.optimizer.step()


case(GRADIENTS, "gradients of `torch.autograd.grad`, set as `p.grad`")(each_step(lambda loop: _set(loop, False)))


@case(GRADIENTS, "gradients of `torch.func.grad`, set as `p.grad`")
@each_step
def from_func(loop):
    x, y = loop.inputs()

    def loss(params):
        return nn.functional.mse_loss(torch.func.functional_call(loop.net, params, (x,)), y)

    loop.optimizer.zero_grad()
    grads = torch.func.grad(loss)({name: p.detach() for name, p in loop.net.named_parameters()})
    for name, param in loop.net.named_parameters():
        param.grad = grads[name].detach()
    loop.optimizer.step()


case(GRADIENTS, "`p.grad` in another order of memory")(each_step(lambda loop: _set(loop, True)))


class Rows(Net):
    """With a table whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x):
        return super().forward(x) + self.table(torch.arange(len(x)) % 4)


case(
    GRADIENTS,
    "`nn.Embedding(sparse=True)`",
    net=Rows,
    differs="as with a dense gradient, which AdamW does not do",
)(lambda loop: None)
case(GRADIENTS, "`p.register_hook` that scales the gradient")(
    lambda loop: loop.net.second.weight.register_hook(lambda grad: grad * 0.5)
)
case(GRADIENTS, "`p.register_post_accumulate_grad_hook` that scales the gradient of one layer", PERHAPS_WRITTEN)(
    lambda loop: loop.net.head.weight.register_post_accumulate_grad_hook(_halve)
)


@case(GRADIENTS, "forward hooks, and full backward hooks on layers")
def hooks_on_layers(loop):
    loop.net.second.register_forward_hook(lambda _module, _given, made: made * 0.5)
    loop.net.third.register_full_backward_hook(lambda _module, given, _: (given[0] * 0.5,))


def _zeroing(told, zero):
    @case(GRADIENTS, told)
    @each_step
    def once(loop):
        zero(loop)
        loop.loss().backward()
        loop.optimizer.step()


_zeroing("`optimizer.zero_grad(set_to_none=True)`", lambda loop: loop.optimizer.zero_grad(set_to_none=True))
_zeroing("`optimizer.zero_grad(set_to_none=False)`", lambda loop: loop.optimizer.zero_grad(set_to_none=False))
_zeroing("`model.zero_grad()`", lambda loop: loop.net.zero_grad())
_zeroing("`model.zero_grad(set_to_none=False)`", lambda loop: loop.net.zero_grad(set_to_none=False))
_zeroing(
    "`zero_grad()` left out at every other step: gradients add up",
    lambda loop: loop.optimizer.zero_grad() if loop.step % 2 else None,
)


@case(GRADIENTS, "a backward that no step follows, and `optimizer.zero_grad()`")
def batch_skipped(loop):
    loop.optimizer.zero_grad()
    loop.loss().backward()
    plain(loop)


@case(GRADIENTS, "a backward that no step follows, and `model.zero_grad()`")
def batch_skipped_by_the_model(loop):
    loop.optimizer.zero_grad()
    loop.loss().backward()
    loop.net.zero_grad()
    loop.loss().backward()
    loop.optimizer.step()
