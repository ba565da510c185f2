"""Layers and parameters replaced, tied, pruned, parametrised, and given adapters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.optim.anyones_loop.deed import BETWEEN_SYNCS, Raises, When, deed
from tests.optim.anyones_loop.deeds.training import same_settings
from tests.optim.anyones_loop.loop import Loop
from tests.optim.seeded import seeded

PARTS = "Layers and parameters: replaced, tied, pruned, parametrised, adapted"
OTHERS = "but for what the optimizer was not told of, as with AdamW"
REPLACED = Raises("nothing but this optimizer holds it any more", "make the optimizer after such changes")


@deed(PARTS, "`model.fc = nn.Linear(...)`", REPLACED)
def layer_replaced(loop: Loop) -> None:
    loop.net.second = seeded(3, lambda: nn.Linear(16, 16))


@deed(PARTS, "`model.fc.weight = nn.Parameter(...)`", REPLACED)
def parameter_replaced(loop: Loop) -> None:
    layer: Any = loop.net.second
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)


@deed(PARTS, "`model.fc = nn.Identity()`: a layer removed", REPLACED)
def layer_removed(loop: Loop) -> None:
    loop.net.third = nn.Identity()


@deed(PARTS, "`model.a.weight = model.b.weight`: tied", REPLACED)
def tied(loop: Loop) -> None:
    net: Any = loop.net
    net.third.weight = net.second.weight


@deed(PARTS, "`model.a.weight = model.b.weight`: tied, before", when=(When.UNMADE,))
def tied_before(loop: Loop) -> None:
    tied(loop)


@deed(PARTS, "`torch.nn.utils.prune.l1_unstructured`")
def pruned(loop: Loop) -> None:
    prune.l1_unstructured(loop.net.second, "weight", amount=0.3)


@deed(PARTS, "`prune.l1_unstructured`, some steps, `prune.remove`", BETWEEN_SYNCS)
def pruned_for_good(loop: Loop) -> None:
    prune.l1_unstructured(loop.net.second, "weight", amount=0.3)
    loop.train(2)
    prune.remove(loop.net.second, "weight")


@deed(PARTS, "`parametrizations.weight_norm`, which makes other parameters", REPLACED)
def weight_norm(loop: Loop) -> None:
    parametrizations.weight_norm(loop.net.second)


@deed(PARTS, "`parametrizations.weight_norm`, before", when=(When.UNMADE,))
def weight_norm_before(loop: Loop) -> None:
    parametrizations.weight_norm(loop.net.second)


class Scaled(nn.Module):
    """A parametrisation without parameters of its own."""

    def forward(self, weight: Tensor) -> Tensor:
        """Half of it."""
        return weight / 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is half of it then."""
        return weight * 2


@deed(PARTS, "`parametrize.register_parametrization`, which keeps the parameter", BETWEEN_SYNCS)
def parametrised(loop: Loop) -> None:
    parametrize.register_parametrization(loop.net.second, "weight", Scaled())


@deed(PARTS, "`parametrize.register_parametrization`, some steps, `remove_parametrizations`", BETWEEN_SYNCS)
def parametrised_for_a_while(loop: Loop) -> None:
    parametrize.register_parametrization(loop.net.second, "weight", Scaled())
    loop.train(2)
    parametrize.remove_parametrizations(loop.net.second, "weight")


class Adapter(nn.Module):
    """What peft makes of a linear layer: it frozen, and two thin matrices beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and the adapter's."""
        return self.base(x) + self.b(self.a(x))


def _adapted(net: Any) -> None:
    for name in ("second", "third"):
        layer = getattr(net, name)
        setattr(net, name, seeded(5, lambda layer=layer: Adapter(layer)))


def _lora(loop: Loop) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["second", "third"], init_lora_weights=False)
    loop.net = loop.model = seeded(5, lambda: peft.get_peft_model(loop.net, config))


ALL_FROZEN = Raises(
    "parameters are frozen: requires_grad is False",
    "Call requires_grad_(True) on those that are to be trained before the optimizer is made",
)


@deed(PARTS, "LoRA by peft: `get_peft_model(model, ...)`", ALL_FROZEN, slow=True)
def lora(loop: Loop) -> None:
    _lora(loop)


@deed(PARTS, "LoRA by peft, before", when=(When.UNMADE,), slow=True)
def lora_before(loop: Loop) -> None:
    _lora(loop)
    make = loop.make_optimizer
    loop.make_optimizer = lambda: make(p for p in loop.net.parameters() if p.requires_grad)  # type: ignore[method-assign]


@deed(
    PARTS,
    "adapters around some layers, which are frozen; not in the optimizer",
    idles=True,
    differs=OTHERS,
)
def adapted(loop: Loop) -> None:
    _adapted(loop.net)


@deed(PARTS, "adapters around some layers, which are frozen; `add_param_group` of the adapters")
def adapted_and_added(loop: Loop) -> None:
    before = set(loop.net.parameters())
    _adapted(loop.net)
    added = [p for p in loop.net.parameters() if p not in before]
    loop.optimizer.add_param_group({"params": added, **same_settings(loop)})


@deed(PARTS, "adapters, before; `model.parameters()`, the frozen ones too", when=(When.UNMADE,))
def adapted_before(loop: Loop) -> None:
    _adapted(loop.net)


@deed(PARTS, "`torch.func.stack_module_state`, beside training")
def stacked(loop: Loop) -> None:
    torch.func.stack_module_state([copy.deepcopy(loop.net) for _ in range(2)])
