"""What is trained, and what is done to the optimizer: its groups edited, its state cleared, schedulers."""

from operator import setitem

import torch
import torch.nn.functional as F
from torch import nn

from tests.optim.anyones_loop.cases import Raises, When, case
from tests.optim.anyones_loop.loop import plain
from tests.optim.seeded import seeded

FREEZING = "What is trained"
OPTIMIZER = "The optimizer"
EDITED = Raises("param_groups", "add_param_group")


class Extended(nn.Module):
    """The model, and a layer more behind it."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.more = seeded(4, lambda: nn.Linear(3, 3))

    def forward(self, x):
        out = self.net(x)
        return out + 0.1 * self.more(F.tanh(out))


def extend(loop):
    """The parameters of a layer more, which the optimizer does not have."""
    extended = Extended(loop.net)
    loop.net = loop.model = extended
    return list(extended.more.parameters())


def add(loop, params):
    """By add_param_group, with the settings of the first group."""
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    settings = {name: value for name, value in loop.optimizer.param_groups[0].items() if name in names}
    loop.optimizer.add_param_group({"params": params, **settings})


def frozen(loop):
    if not getattr(loop.optimizer, "at_sync", True):  # ranks hold different values, which the next sync makes equal
        loop.optimizer.prepare_to_save()
    layer = loop.net.second.requires_grad_(False)
    before = [p.detach().clone() for p in layer.parameters()]

    def compare():
        for param, value in zip(layer.parameters(), before, strict=True):
            assert torch.equal(param, value), "a frozen parameter has moved"

    loop.at_end.append(compare)


case(FREEZING, "`model.fc.requires_grad_(False)`")(frozen)
case(FREEZING, "`model.fc.requires_grad_(False)`, before", when=(When.UNMADE,))(frozen)


@case(FREEZING, "`model.fc.requires_grad_(False)`, some steps, and `True` again")
def unfrozen(loop):
    loop.net.second.requires_grad_(False)
    loop.train(2)
    loop.net.second.requires_grad_(True)


@case(FREEZING, "`model.requires_grad_(False)`: all frozen", Raises("requires_grad", "requires_grad_(True)"))
def all_frozen(loop):
    """backward itself fails; a loop that goes on without one calls step() alone."""
    loop.net.requires_grad_(False)
    loop.iterate = lambda loop: loop.optimizer.step()


@case(FREEZING, "`requires_grad` off and on again around another backward (a GAN)")
def toggled_around_a_backward(loop):
    other = seeded(9, lambda: nn.Linear(18, 18))

    def once(loop):
        x, _ = loop.inputs()
        loop.net.requires_grad_(False)
        loop.model(other(x.flatten(1)).view_as(x)).mean().backward()
        loop.net.requires_grad_(True)
        plain(loop)

    loop.iterate = once


case(FREEZING, "a new layer, and `optimizer.add_param_group`")(lambda loop: add(loop, extend(loop)))
case(
    FREEZING,
    "a new layer that is not added to the optimizer",
    idles=True,
    differs="but for the new layer, as with AdamW",
)(extend)


def _edited(told, act):
    """Of every group."""

    @case(OPTIMIZER, told)
    def do(loop):
        for group in loop.optimizer.param_groups:
            act(group)


_edited('`group["lr"] = ...`', lambda group: setitem(group, "lr", 0.7 * group["lr"]))
_edited('`group["lr"] = torch.tensor(...)`', lambda group: setitem(group, "lr", torch.tensor(0.7 * group["lr"])))
_edited('`group["weight_decay"] = 0`', lambda group: setitem(group, "weight_decay", 0))
_edited('`group["betas"] = ...`', lambda group: "betas" in group and setitem(group, "betas", (0.8, 0.99)))


@case(OPTIMIZER, "a scheduler of torch's")
def scheduled(loop):
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 0.97**step)

    def once(loop):
        plain(loop)
        schedule.step()

    loop.iterate = once


@case(OPTIMIZER, '`group["params"].append(p)`', EDITED)
def appended_by_hand(loop):
    loop.optimizer.param_groups[0]["params"] += extend(loop)


@case(OPTIMIZER, '`group["params"][0] = another`', EDITED)
def exchanged_by_hand(loop):
    layer = loop.net.conv
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)
    loop.optimizer.param_groups[0]["params"][0] = layer.weight


@case(OPTIMIZER, '`group["params"].remove(p)`', EDITED)
def removed_by_hand(loop):
    del loop.optimizer.param_groups[0]["params"][0]
    loop.net.conv.weight.requires_grad_(False)


@case(OPTIMIZER, "`param_groups.append({...})`", EDITED)
def group_appended_by_hand(loop):
    loop.optimizer.param_groups.append({**loop.optimizer.param_groups[0], "params": extend(loop)})


case(OPTIMIZER, "`optimizer.state.clear()`", Raises("optimizer.state", "make the optimizer anew"))(
    lambda loop: loop.optimizer.state.clear()
)


@case(
    OPTIMIZER,
    '`optimizer.state[p]["exp_avg"].zero_()`',
    Raises(
        "was written after the warm-up",
        "make the optimizer anew",
        when=(When.COMPRESSED,),
        optimizers=("onebit_adam", "onebit_lamb"),
    ),
)
def momentum_cleared(loop):
    for state in loop.optimizer.state.values():
        if "exp_avg" in state:
            state["exp_avg"].zero_()


case(OPTIMIZER, "another optimizer over the same parameters, in place of the first")(lambda loop: loop.make_optimizer())


@case(
    OPTIMIZER,
    "`optimizer.step()` without a gradient at all",
    none_is_zero=True,
    differs="with a gradient of zero; AdamW leaves the tensor out",
)
def stepped_without_gradients(loop):
    loop.optimizer.zero_grad()
    loop.optimizer.step()


@case(OPTIMIZER, "`optimizer.step()` twice after one backward")
def stepped_twice(loop):
    plain(loop)
    loop.optimizer.step()
