"""Gradients set, dropped, clipped and replaced between backward and step(), and hooks on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.optim.anyones_loop.deed import Raises, deed
from tests.optim.anyones_loop.loop import Loop, Net, plain

GRADIENTS = "Gradients"
WRITTEN = Raises("gradients were written between backward and step()", "use overlap=False", overlap=True)
PERHAPS_WRITTEN = replace(WRITTEN, perhaps=True)


def _each(loop: Loop, act: Callable[[nn.Parameter], None]) -> None:
    """Between every backward and step from here on."""

    def on_all() -> None:
        for param in loop.net.parameters():
            if param.grad is not None:
                act(param)

    loop.between.append(on_all)


@deed(GRADIENTS, "`torch.nn.utils.clip_grad_norm_`, before each step", WRITTEN)
def clipped_by_norm(loop: Loop) -> None:
    loop.between.append(lambda: nn.utils.clip_grad_norm_(loop.net.parameters(), 0.3))


@deed(GRADIENTS, "`torch.nn.utils.clip_grad_value_`, before each step", WRITTEN)
def clipped_by_value(loop: Loop) -> None:
    loop.between.append(lambda: nn.utils.clip_grad_value_(loop.net.parameters(), 0.01))


@deed(GRADIENTS, "`p.grad.mul_(0.5)`, before each step", WRITTEN)
def scaled_in_place(loop: Loop) -> None:
    def scale(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    _each(loop, scale)


@deed(GRADIENTS, "`p.grad = p.grad * 0.5`, before each step", WRITTEN)
def scaled_as_others(loop: Loop) -> None:
    def scale(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad = param.grad * 0.5

    _each(loop, scale)


@deed(GRADIENTS, "`p.grad.data = other`, before each step", WRITTEN)
def data_replaced(loop: Loop) -> None:
    def scale(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.data = param.grad.data * 0.5

    _each(loop, scale)


@deed(GRADIENTS, "`p.grad.data.mul_(0.5)`, before each step, without overlap", overlaps=(False,))
def scaled_through_data(loop: Loop) -> None:
    def scale(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.data.mul_(0.5)

    _each(loop, scale)


@deed(GRADIENTS, "one `p.grad.mul_(0.5)`, of one layer, before each step", WRITTEN)
def one_scaled_in_place(loop: Loop) -> None:
    def scale() -> None:
        grad = loop.net.get_parameter("second.weight").grad
        assert grad is not None
        grad.mul_(0.5)

    loop.between.append(scale)


@deed(
    GRADIENTS,
    "`p.grad = None`, of all, for one step",
    WRITTEN,
    none_is_zero=True,
    differs="with a gradient of zero; AdamW leaves the tensor out",
)
def all_dropped(loop: Loop) -> None:
    at = loop.step + 1

    def drop() -> None:
        if loop.step == at:
            for param in loop.net.parameters():
                param.grad = None

    loop.between.append(drop)


@deed(
    GRADIENTS,
    "`p.grad = None`, of one layer, for one step",
    WRITTEN,
    none_is_zero=True,
    differs="with a gradient of zero; AdamW leaves the tensor out",
)
def one_dropped(loop: Loop) -> None:
    at = loop.step + 1

    def drop() -> None:
        if loop.step == at:
            loop.net.get_parameter("second.weight").grad = None

    loop.between.append(drop)


@deed(GRADIENTS, "gradients of `torch.autograd.grad`, set as `p.grad`")
def from_autograd(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        params = list(loop.net.parameters())
        for param, grad in zip(params, torch.autograd.grad(loop.loss(), params), strict=True):
            param.grad = grad
        loop.optimizer.step()

    loop.iterate = iterate


@deed(GRADIENTS, "gradients of `torch.func.grad`, set as `p.grad`")
def from_func(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        x, y = loop.inputs()

        def loss(params: dict[str, Tensor]) -> Tensor:
            return nn.functional.mse_loss(torch.func.functional_call(loop.net, params, (x,)), y)

        loop.optimizer.zero_grad()
        grads = torch.func.grad(loss)({name: p.detach() for name, p in loop.net.named_parameters()})
        for name, param in loop.net.named_parameters():
            param.grad = grads[name].detach()
        loop.optimizer.step()

    loop.iterate = iterate


@deed(GRADIENTS, "`p.grad` in another order of memory")
def in_another_order(loop: Loop) -> None:
    def iterate(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        params = list(loop.net.parameters())
        for param, grad in zip(params, torch.autograd.grad(loop.loss(), params), strict=True):
            turned = grad.dim() == 2
            param.grad = grad.t().contiguous().t() if turned else grad
        loop.optimizer.step()

    loop.iterate = iterate


class Rows(Net):
    """With a table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        """One row more."""
        return super().forward(x) + self.table(torch.arange(len(x)) % 4)


@deed(GRADIENTS, "`nn.Embedding(sparse=True)`", net=Rows, differs="as with a dense gradient, which AdamW does not do")
def sparse(loop: Loop) -> None:
    pass


def _half(grad: Tensor) -> Tensor:
    return grad * 0.5


@deed(GRADIENTS, "`p.register_hook` that scales the gradient")
def hook_on_one(loop: Loop) -> None:
    loop.net.get_parameter("second.weight").register_hook(_half)


@deed(GRADIENTS, "`p.register_post_accumulate_grad_hook` that scales the gradient of one layer", PERHAPS_WRITTEN)
def late_hook_on_one(loop: Loop) -> None:
    def scale(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    loop.net.get_parameter("head.weight").register_post_accumulate_grad_hook(scale)


@deed(GRADIENTS, "forward hooks, and full backward hooks on layers")
def hooks_on_layers(loop: Loop) -> None:
    net = loop.net
    net.get_submodule("second").register_forward_hook(lambda _module, _given, made: made * 0.5)
    net.get_submodule("third").register_full_backward_hook(lambda _module, given, _: (given[0] * 0.5,))


@deed(GRADIENTS, "`optimizer.zero_grad(set_to_none=True)`")
def zeroed_to_none(loop: Loop) -> None:
    _zeroing(loop, lambda loop: loop.optimizer.zero_grad(set_to_none=True))


@deed(GRADIENTS, "`optimizer.zero_grad(set_to_none=False)`")
def zeroed_in_place(loop: Loop) -> None:
    _zeroing(loop, lambda loop: loop.optimizer.zero_grad(set_to_none=False))


@deed(GRADIENTS, "`model.zero_grad()`")
def zeroed_by_the_model(loop: Loop) -> None:
    _zeroing(loop, lambda loop: loop.net.zero_grad())


@deed(GRADIENTS, "`model.zero_grad(set_to_none=False)`")
def zeroed_in_place_by_the_model(loop: Loop) -> None:
    _zeroing(loop, lambda loop: loop.net.zero_grad(set_to_none=False))


@deed(GRADIENTS, "`zero_grad()` left out at every other step: gradients add up")
def not_zeroed(loop: Loop) -> None:
    _zeroing(loop, lambda loop: loop.optimizer.zero_grad() if loop.step % 2 else None)


def _zeroing(loop: Loop, zero: Callable[[Loop], None]) -> None:
    def iterate(loop: Loop) -> None:
        zero(loop)
        loop.loss().backward()
        loop.optimizer.step()

    loop.iterate = iterate


@deed(GRADIENTS, "a backward that no step follows, and `optimizer.zero_grad()`")
def batch_skipped(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.loss().backward()
    plain(loop)


@deed(GRADIENTS, "a backward that no step follows, and `model.zero_grad()`")
def batch_skipped_by_the_model(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.loss().backward()
    loop.net.zero_grad()
    loop.loss().backward()
    loop.optimizer.step()
