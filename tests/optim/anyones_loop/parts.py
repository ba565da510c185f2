"""Layers and parameters replaced, tied, pruned, parametrised, and given adapters."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.optim.anyones_loop.cases import BETWEEN_SYNCS, Raises, When, case
from tests.optim.anyones_loop.groups import add
from tests.optim.anyones_loop.memory import OTHER_PARAMETERS
from tests.optim.seeded import seeded

PARTS = "Layers and parameters: replaced, tied, pruned, parametrised, adapted"


@case(PARTS, "`model.fc = nn.Linear(...)`", OTHER_PARAMETERS)
def layer_replaced(loop):
    loop.net.second = seeded(3, lambda: nn.Linear(16, 16))


@case(PARTS, "`model.fc.weight = nn.Parameter(...)`", OTHER_PARAMETERS)
def parameter_replaced(loop):
    layer = loop.net.second
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)


@case(PARTS, "`model.fc = nn.Identity()`: a layer removed", OTHER_PARAMETERS)
def layer_removed(loop):
    loop.net.third = nn.Identity()


def tied(loop):
    loop.net.third.weight = loop.net.second.weight


case(PARTS, "`model.a.weight = model.b.weight`: tied", OTHER_PARAMETERS)(tied)
case(PARTS, "`model.a.weight = model.b.weight`: tied, before", when=(When.UNMADE,))(tied)


case(PARTS, "`torch.nn.utils.prune.l1_unstructured`")(
    lambda loop: prune.l1_unstructured(loop.net.second, "weight", amount=0.3)
)


@case(PARTS, "`prune.l1_unstructured`, some steps, `prune.remove`", BETWEEN_SYNCS)
def pruned_for_good(loop):
    prune.l1_unstructured(loop.net.second, "weight", amount=0.3)
    loop.train(2)
    prune.remove(loop.net.second, "weight")


case(PARTS, "`parametrizations.weight_norm`, which makes other parameters", OTHER_PARAMETERS)(
    lambda loop: parametrizations.weight_norm(loop.net.second)
)
case(PARTS, "`parametrizations.weight_norm`, before", when=(When.UNMADE,))(
    lambda loop: parametrizations.weight_norm(loop.net.second)
)


class Scaled(nn.Module):
    """A parametrisation without parameters of its own."""

    def forward(self, weight):
        return weight / 2

    def right_inverse(self, weight):
        return weight * 2


case(PARTS, "`parametrize.register_parametrization`, which keeps the parameter", BETWEEN_SYNCS)(
    lambda loop: parametrize.register_parametrization(loop.net.second, "weight", Scaled())
)


@case(PARTS, "`parametrize.register_parametrization`, some steps, `remove_parametrizations`", BETWEEN_SYNCS)
def parametrised_for_a_while(loop):
    parametrize.register_parametrization(loop.net.second, "weight", Scaled())
    loop.train(2)
    parametrize.remove_parametrizations(loop.net.second, "weight")


class Adapter(nn.Module):
    """What peft makes of a linear layer: it frozen, and two thin matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def _adapted(net):
    for name in ("second", "third"):
        layer = getattr(net, name)
        setattr(net, name, seeded(5, lambda layer=layer: Adapter(layer)))


@case(
    PARTS,
    "LoRA by peft: `get_peft_model(model, ...)`",
    Raises(
        "parameters are frozen: requires_grad is False",
        "Call requires_grad_(True) on those that are to be trained before the optimizer is made",
    ),
    slow=True,
)
def lora(loop):
    import peft

    config = peft.LoraConfig(r=2, target_modules=["second", "third"], init_lora_weights=False)
    loop.net = loop.model = seeded(5, lambda: peft.get_peft_model(loop.net, config))


@case(PARTS, "LoRA by peft, before", when=(When.UNMADE,), slow=True)
def lora_before(loop):
    lora(loop)
    make = loop.make_optimizer
    loop.make_optimizer = lambda: make(p for p in loop.net.parameters() if p.requires_grad)


case(
    PARTS,
    "adapters around some layers, which are frozen; not in the optimizer",
    idles=True,
    differs="but for what was not added to the optimizer, as with AdamW",
)(lambda loop: _adapted(loop.net))


@case(PARTS, "adapters around some layers, which are frozen; `add_param_group` of the adapters")
def adapted_and_added(loop):
    before = set(loop.net.parameters())
    _adapted(loop.net)
    add(loop, [p for p in loop.net.parameters() if p not in before])


case(PARTS, "adapters, before; `model.parameters()`, the frozen ones too", when=(When.UNMADE,))(
    lambda loop: _adapted(loop.net)
)
case(PARTS, "`torch.func.stack_module_state`, beside training")(
    lambda loop: torch.func.stack_module_state([copy.deepcopy(loop.net) for _ in range(2)])
)
