"""The lines of docs/from-ddp-hooks.md and from-torchft.md: each names what there is, and runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thinwire import optim
from thinwire.optim import OneBitAdam
from thinwire.optim.moments import Moments, take_over

DOCS = Path(__file__).parents[2] / "docs"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 30)


def lines_of(document: str) -> list[str]:
    """The calls of the column `here`, with what they leave open filled in."""
    found = []
    for line in (DOCS / document).read_text().splitlines():
        cells = line.split(" | ")
        if line.startswith("| ") and len(cells) > 1:
            found += re.findall(r"`((?:Adam|OneBitAdam|OneBitSGD|LocalSteps)\(.*?\))`", cells[1])
    return [line.replace(", ...)", ", lr=0.1)").replace("(...)", "(model.parameters(), lr=0.1)") for line in found]


CALLS = [line.replace("lr=...", "lr=0.1") for line in lines_of("from-ddp-hooks.md")]
CALLS += [line.replace("SGD(...", "SGD(model.parameters(), lr=0.1") for line in lines_of("from-torchft.md")]


@pytest.mark.parametrize("line", CALLS)
def test_each_line_makes_an_optimizer_that_steps(line):
    model = small()
    names: dict[str, Any] = {**{name: getattr(optim, name) for name in optim.__all__}, "torch": torch, "model": model}
    names["inner"] = names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.1)
    made = eval(line, names)
    model(torch.ones(2, 5)).square().mean().backward()
    made.step()
    assert made.num_steps == 1


def test_there_are_such_lines():
    assert len(CALLS) >= 5
    assert any("OuterSGD" in line for line in CALLS)


def test_a_run_behind_a_hook_goes_on_with_its_moments():
    model = small()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 5)).square().mean().backward()
    adamw.step()
    block = re.findall(r"```python\n(.*?)```", (DOCS / "from-ddp-hooks.md").read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {"model": model, "adamw": adamw}
    exec(block, names)
    assert names["optimizer"].num_steps == 1
    assert (names["OneBitAdam"], names["Moments"], names["take_over"]) == (OneBitAdam, Moments, take_over)
