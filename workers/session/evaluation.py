"""What the function of run.evaluate_every has found, as all ranks together say it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.comm.groups.texts import texts_if_they_differ
from thinwire.contract.reports import wrong_with_reported_name
from thinwire.workers.session.training import ScriptError, Training
from thinwire.workers.telemetry.step_log import refuse_non_finite

Found = float | Tensor | Mapping[str, float | Tensor]
"""What a function of run.evaluate_every returns."""


def evaluated(training: Training, evaluate: Callable[[], Found], weight: Callable[[], float]) -> dict[str, float]:
    """What an evaluation found, by name, the validation loss as "loss": means over the ranks, by their weights.

    The same on every rank. Collective. Raises: NonFiniteLoss, ScriptError, PeerLost.
    """
    group, device = training.group, training.device
    own, mine = by_name(evaluate()), weight()
    here = json.dumps(sorted(own))
    all_said = texts_if_they_differ(group, here, device) or [here]
    names = sorted({name for text in all_said for name in json.loads(text)})
    if not names:
        return {}
    row = [[own[name] * mine, mine] if name in own else [0.0, 0.0] for name in names]
    sums = torch.tensor(row, dtype=torch.float64, device=device)
    finite = torch.isfinite(sums).all()
    group.mean_(sums)
    found = dict(zip(names, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))
    if training.refuses_nan and "loss" in found:
        refuse_non_finite("validation loss", found["loss"], group, finite)
    return found


def by_name(found: Found) -> dict[str, float]:
    """A number alone is the validation loss. Raises: ScriptError for what is neither a number nor numbers by name."""
    named = found if isinstance(found, Mapping) else {"loss": found}
    numbers = {}
    for name, value in named.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            what = f"{type(value).__name__} {str(value)[:100]!r}" + (f" as {name!r}" if found is named else "")
            raise ScriptError(
                f"the function of run.evaluate_every returned {what}: return the validation loss of this rank's part, "
                'a number, or numbers by name, such as {"loss": 0.31, "accuracy": 0.92}'
            ) from error
        if wrong := wrong_with_reported_name(f"validation_{name}"):
            raise ScriptError(f"the function of run.evaluate_every returned {str(name)[:100]!r}: {wrong}")
    return numbers
