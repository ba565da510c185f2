"""What is trained: layers frozen and unfrozen, and added."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.optim.anyones_loop.deed import Raises, When, deed
from tests.optim.anyones_loop.loop import Loop
from tests.optim.seeded import seeded

FREEZING = "What is trained"


@deed(FREEZING, "`model.fc.requires_grad_(False)`")
def frozen(loop: Loop) -> None:
    if not getattr(loop.optimizer, "at_sync", True):  # ranks hold different values, which the next sync makes equal
        loop.optimizer.prepare_to_save()
    loop.net.get_submodule("second").requires_grad_(False)
    before = [p.detach().clone() for p in loop.net.get_submodule("second").parameters()]

    def compare() -> None:
        for param, value in zip(loop.net.get_submodule("second").parameters(), before, strict=True):
            assert torch.equal(param, value), "a frozen parameter has moved"

    loop.at_end.append(compare)


@deed(FREEZING, "`model.fc.requires_grad_(False)`, before", when=(When.UNMADE,))
def frozen_before(loop: Loop) -> None:
    frozen(loop)


@deed(FREEZING, "`model.fc.requires_grad_(False)`, some steps, and `True` again")
def unfrozen(loop: Loop) -> None:
    loop.net.get_submodule("second").requires_grad_(False)
    loop.train(2)
    loop.net.get_submodule("second").requires_grad_(True)


@deed(FREEZING, "`model.requires_grad_(False)`: all frozen", Raises("requires_grad", "requires_grad_(True)"))
def all_frozen(loop: Loop) -> None:
    """backward itself fails; who goes on without one calls step() alone."""
    loop.net.requires_grad_(False)
    loop.iterate = lambda loop: loop.optimizer.step()


@deed(FREEZING, "`requires_grad` off and on again around another backward (a GAN)")
def toggled_around_a_backward(loop: Loop) -> None:
    other = seeded(9, lambda: nn.Linear(18, 18))

    def iterate(loop: Loop) -> None:
        x, _ = loop.inputs()
        loop.net.requires_grad_(False)
        loop.model(other(x.flatten(1)).view_as(x)).mean().backward()
        loop.net.requires_grad_(True)
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.optimizer.step()

    loop.iterate = iterate


class Extended(nn.Module):
    """The model, and a layer more behind it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.more = seeded(4, lambda: nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3]"""
        out: Tensor = self.net(x)
        return out + 0.1 * self.more(F.tanh(out))


def same_settings(loop: Loop) -> dict[str, object]:
    """Those of the first group, for one more."""
    names = ("lr", "betas", "eps", "weight_decay", "momentum")
    return {name: value for name, value in loop.optimizer.param_groups[0].items() if name in names}


@deed(FREEZING, "a new layer, and `optimizer.add_param_group`")
def group_added(loop: Loop) -> None:
    extended = Extended(loop.net)
    loop.net = loop.model = extended
    loop.optimizer.add_param_group({"params": list(extended.more.parameters()), **same_settings(loop)})


@deed(
    FREEZING,
    "a new layer, which the optimizer is not told of",
    idles=True,
    differs="but for the new layer, as with AdamW",
)
def layer_not_added(loop: Loop) -> None:
    loop.net = loop.model = Extended(loop.net)
