"""Moves, casts and other memory for the same parameters."""

from contextlib import contextmanager

import torch
from torch import nn

from tests.optim.anyones_loop.cases import BETWEEN_SYNCS, Raises, When, case

MEMORY = "Moves, casts and memory"
CONVERT_FIRST = Raises("move and convert the model first", "then make the optimizer")
OTHER_PARAMETERS = Raises("nothing but this optimizer holds it any more", "make the optimizer after such changes")


def initialised(net):
    """Other weights, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in net.parameters():
            param.normal_(std=0.2, generator=generator)


@contextmanager
def _on_conversion(setting):
    getattr(torch.__future__, f"set_{setting}_module_params_on_conversion")(True)
    try:
        yield
    finally:
        getattr(torch.__future__, f"set_{setting}_module_params_on_conversion")(False)


case(MEMORY, '`model.to("cpu")`')(lambda loop: loop.net.to("cpu"))
case(MEMORY, '`model.to("cpu:0")`')(lambda loop: loop.net.to("cpu:0"))
case(MEMORY, "`model.double().float()`")(lambda loop: loop.net.double().float())
case(MEMORY, "`model.half().float()`", BETWEEN_SYNCS)(lambda loop: loop.net.half().float())
case(MEMORY, "`model.to(torch.float64)`", CONVERT_FIRST)(lambda loop: loop.net.to(torch.float64))
case(MEMORY, "`model.bfloat16()`", CONVERT_FIRST)(lambda loop: loop.net.bfloat16())
case(
    MEMORY,
    "`model.double().float()` under `set_swap_module_params_on_conversion(True)`",
    around=lambda: _on_conversion("swap"),
)(lambda loop: loop.net.double().float())
case(
    MEMORY,
    "`model.double().float()` under `set_overwrite_module_params_on_conversion(True)`, which makes other parameters",
    OTHER_PARAMETERS,
    around=lambda: _on_conversion("overwrite"),
)(lambda loop: loop.net.double().float())
case(MEMORY, "`model.to(memory_format=torch.channels_last)`", when=tuple(When))(
    lambda loop: loop.net.to(memory_format=torch.channels_last)
)


@case(MEMORY, '`model.to_empty(device="cpu")`, then initialised', BETWEEN_SYNCS)
def emptied_and_initialised(loop):
    loop.net.to_empty(device="cpu")
    initialised(loop.net)


case(MEMORY, "`model.share_memory()`", when=tuple(When))(lambda loop: loop.net.share_memory())


@case(MEMORY, "`p.data = p.data.clone()`")
def memory_of_ones_own(loop):
    for param in loop.net.parameters():
        param.data = param.data.clone()


@case(MEMORY, "`p.data = p.data.t().contiguous().t()`, of a matrix")
def memory_in_another_order(loop):
    weight = loop.net.get_parameter("second.weight")
    weight.data = weight.data.t().contiguous().t()


class FirstThree(nn.Module):
    """Of a model with more outputs, the first three."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[:, :3]


@case(
    MEMORY,
    "`p.data` of another shape (a larger vocabulary)",
    Raises("and is now torch.float32 (4,)", "then make the optimizer"),
)
def memory_of_another_shape(loop):
    for param in loop.net.head.parameters():
        param.data = torch.cat([param.data, param.data[:1]])
        param.grad = None  # as zero_grad() of torch leaves it
    loop.net = loop.model = FirstThree(loop.net)


@case(MEMORY, "`torch.nn.utils.vector_to_parameters`", BETWEEN_SYNCS)
def parameters_from_a_vector(loop):
    vector = nn.utils.parameters_to_vector(loop.net.parameters()).detach() * 0.9
    nn.utils.vector_to_parameters(vector, loop.net.parameters())


@case(MEMORY, "`torch.utils.swap_tensors(p, another)`", BETWEEN_SYNCS)
def tensors_swapped(loop):
    weight = loop.net.get_parameter("second.weight")
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 0.9))


@case(MEMORY, "the parameters moved into a `ParameterList`")
def in_a_list_of_parameters(loop):
    loop.net.also = nn.ParameterList(loop.net.second.parameters())


case(MEMORY, "`model.cuda()`", CONVERT_FIRST, gpu=True)(lambda loop: loop.net.cuda())
case(MEMORY, "`model.cuda().cpu()`", gpu=True)(lambda loop: loop.net.cuda().cpu())
