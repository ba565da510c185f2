"""Moves, casts and other memory for the same parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.optim.anyones_loop.deed import BETWEEN_SYNCS, Raises, When, deed
from tests.optim.anyones_loop.loop import Loop

MEMORY = "Moves, casts and memory"
CONVERT_FIRST = Raises("move and convert the model first", "then make the optimizer")


def initialised(net: nn.Module) -> None:
    """Other weights, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in net.parameters():
            param.normal_(std=0.2, generator=generator)


@deed(MEMORY, '`model.to("cpu")`')
def moved_to_where_it_is(loop: Loop) -> None:
    loop.net.to("cpu")


@deed(MEMORY, '`model.to("cpu:0")`')
def moved_to_the_same_device_by_another_name(loop: Loop) -> None:
    loop.net.to("cpu:0")


@deed(MEMORY, "`model.double().float()`")
def cast_up_and_back(loop: Loop) -> None:
    loop.net.double().float()


@deed(MEMORY, "`model.half().float()`", BETWEEN_SYNCS)
def cast_down_and_back(loop: Loop) -> None:
    loop.net.half().float()


@deed(MEMORY, "`model.to(torch.float64)`", CONVERT_FIRST)
def cast_up(loop: Loop) -> None:
    loop.net.to(torch.float64)


@deed(MEMORY, "`model.bfloat16()`", CONVERT_FIRST)
def cast_down(loop: Loop) -> None:
    loop.net.bfloat16()


@contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@deed(
    MEMORY,
    "`model.double().float()` under `set_swap_module_params_on_conversion(True)`",
    around=_swapping,
)
def cast_up_and_back_by_swapping(loop: Loop) -> None:
    loop.net.double().float()


@contextmanager
def _overwriting() -> Iterator[None]:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@deed(
    MEMORY,
    "`model.double().float()` under `set_overwrite_module_params_on_conversion(True)`, which makes other parameters",
    Raises("nothing but this optimizer holds it any more", "make the optimizer after such changes"),
    around=_overwriting,
)
def cast_up_and_back_by_other_parameters(loop: Loop) -> None:
    loop.net.double().float()


@deed(MEMORY, "`model.to(memory_format=torch.channels_last)`", when=tuple(When))
def channels_last(loop: Loop) -> None:
    loop.net.to(memory_format=torch.channels_last)


@deed(MEMORY, '`model.to_empty(device="cpu")`, then initialised', BETWEEN_SYNCS)
def emptied_and_initialised(loop: Loop) -> None:
    loop.net.to_empty(device="cpu")
    initialised(loop.net)


@deed(MEMORY, "`model.share_memory()`", when=tuple(When))
def shared_with_other_processes(loop: Loop) -> None:
    loop.net.share_memory()


@deed(MEMORY, "`p.data = p.data.clone()`")
def memory_of_ones_own(loop: Loop) -> None:
    for param in loop.net.parameters():
        param.data = param.data.clone()


@deed(MEMORY, "`p.data = p.data.t().contiguous().t()`, of a matrix")
def memory_in_another_order(loop: Loop) -> None:
    weight = loop.net.get_parameter("second.weight")
    weight.data = weight.data.t().contiguous().t()


class FirstThree(nn.Module):
    """Of a model with more outputs, the first three."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3]"""
        out: Tensor = self.net(x)
        return out[:, :3]


@deed(
    MEMORY,
    "`p.data` of another shape (a larger vocabulary)",
    Raises("and is now torch.float32 (4,)", "then make the optimizer"),
)
def memory_of_another_shape(loop: Loop) -> None:
    weight = loop.net.get_parameter("head.weight")
    weight.data = torch.cat([weight.data, weight.data[:1]])
    bias = loop.net.get_parameter("head.bias")
    bias.data = torch.cat([bias.data, bias.data[:1]])
    weight.grad = bias.grad = None  # as zero_grad() of torch leaves it
    loop.net = loop.model = FirstThree(loop.net)


@deed(MEMORY, "`torch.nn.utils.vector_to_parameters`", BETWEEN_SYNCS)
def parameters_from_a_vector(loop: Loop) -> None:
    vector = nn.utils.parameters_to_vector(loop.net.parameters()).detach() * 0.9
    nn.utils.vector_to_parameters(vector, loop.net.parameters())


@deed(MEMORY, "`torch.utils.swap_tensors(p, another)`", BETWEEN_SYNCS)
def tensors_swapped(loop: Loop) -> None:
    weight = loop.net.get_parameter("second.weight")
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 0.9))


@deed(MEMORY, "the parameters moved into a `ParameterList`")
def in_a_list_of_parameters(loop: Loop) -> None:
    loop.net.also = nn.ParameterList(loop.net.get_submodule("second").parameters())


@deed(MEMORY, "`model.cuda()`", CONVERT_FIRST, gpu=True)
def moved_to_a_gpu(loop: Loop) -> None:
    loop.net.cuda()


@deed(MEMORY, "`model.cuda().cpu()`", gpu=True)
def moved_to_a_gpu_and_back(loop: Loop) -> None:
    loop.net.cuda().cpu()
