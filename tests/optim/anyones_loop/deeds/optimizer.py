"""What is done to the optimizer: its groups edited, its state cleared, another one made, schedulers."""

from __future__ import annotations

import torch
from torch import nn

from tests.optim.anyones_loop.deed import Raises, When, deed
from tests.optim.anyones_loop.deeds.training import Extended
from tests.optim.anyones_loop.loop import Loop, plain

OPTIMIZER = "The optimizer"


@deed(OPTIMIZER, '`group["lr"] = ...`')
def rate_set(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.7


@deed(OPTIMIZER, '`group["lr"] = torch.tensor(...)`')
def rate_as_a_tensor(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] = torch.tensor(0.7 * group["lr"])


@deed(OPTIMIZER, '`group["weight_decay"] = 0`')
def decay_set(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["weight_decay"] = 0


@deed(OPTIMIZER, '`group["betas"] = ...`')
def betas_set(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.8, 0.99)


@deed(OPTIMIZER, "a scheduler of torch's")
def scheduled(loop: Loop) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 0.97**step)

    def iterate(loop: Loop) -> None:
        plain(loop)
        schedule.step()

    loop.iterate = iterate


EDITED = Raises("param_groups", "add_param_group")


@deed(OPTIMIZER, '`group["params"].append(p)`', EDITED)
def appended_by_hand(loop: Loop) -> None:
    extended = Extended(loop.net)
    loop.net = loop.model = extended
    loop.optimizer.param_groups[0]["params"] += list(extended.more.parameters())


@deed(OPTIMIZER, '`group["params"][0] = another`', EDITED)
def exchanged_by_hand(loop: Loop) -> None:
    params = loop.optimizer.param_groups[0]["params"]
    layer = loop.net.get_submodule("conv")
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)
    params[0] = layer.weight


@deed(OPTIMIZER, '`group["params"].remove(p)`', EDITED)
def removed_by_hand(loop: Loop) -> None:
    del loop.optimizer.param_groups[0]["params"][0]
    loop.net.get_parameter("conv.weight").requires_grad_(False)


@deed(OPTIMIZER, "`param_groups.append({...})`", EDITED)
def group_appended_by_hand(loop: Loop) -> None:
    extended = Extended(loop.net)
    loop.net = loop.model = extended
    first = loop.optimizer.param_groups[0]
    loop.optimizer.param_groups.append({**first, "params": list(extended.more.parameters())})


CLEARED = Raises("optimizer.state", "make the optimizer anew")


@deed(OPTIMIZER, "`optimizer.state.clear()`", CLEARED)
def state_cleared(loop: Loop) -> None:
    loop.optimizer.state.clear()


@deed(
    OPTIMIZER,
    '`optimizer.state[p]["exp_avg"].zero_()`',
    Raises(
        "was written after the warm-up",
        "make the optimizer anew",
        when=(When.COMPRESSED,),
        optimizers=("onebit_adam", "onebit_lamb"),
    ),
)
def momentum_cleared(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        if "exp_avg" in state:
            state["exp_avg"].zero_()


@deed(OPTIMIZER, "another optimizer over the same parameters, in place of the first")
def made_again(loop: Loop) -> None:
    loop.make_optimizer()


@deed(
    OPTIMIZER,
    "`optimizer.step()` without a gradient at all",
    none_is_zero=True,
    differs="with a gradient of zero; AdamW leaves the tensor out",
)
def stepped_without_gradients(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.optimizer.step()


@deed(OPTIMIZER, "`optimizer.step()` twice after one backward")
def stepped_twice(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.loss().backward()
    loop.optimizer.step()
    loop.optimizer.step()
