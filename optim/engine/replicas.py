"""A check, now and then, that all ranks hold the same parameters and step with the same settings; logged.

Nothing brings replicas together again that have drifted apart: a learning rate that follows each rank's own loss,
weights written on one rank, two threads on one process group. Every rank would train on, and none would know.

A warning and no error: machines of two kinds may round differently, and train well. 16 bytes a rank, every EVERY steps.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from torch import Tensor

from thinwire.comm.groups.texts import texts_if_they_differ
from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.shares import digest

logger = logging.getLogger(__name__)

EVERY = 100
"""Steps from one comparison to the next. It reads the parameters twice, which is little beside so many steps."""
TO_DO = (
    "nothing brings these ranks together again. Give all the same learning rate and settings (a ReduceLROnPlateau the "
    "loss averaged over ranks), write weights alike on every rank, and step a process group's optimizers from one "
    "thread; then go on from a checkpoint of before"
)
_PARAMETERS = "parameters"


class Replicas:
    """Compared over the ranks of one exchange: the first time EVERY steps after it was made, or loaded."""

    def __init__(self) -> None:
        self._compared: int | None = None
        self._said = False

    def compare(self, optimizer: Algorithm[Any]) -> None:
        """Where it is time: say once, on rank 0, what differs. Collective. Raises: PeerLost."""
        now = optimizer.common_steps // EVERY
        if self._compared is None:
            self._compared = now
        if now == self._compared or optimizer.group.size == 1:
            return
        own_N = optimizer.common_parameters
        own = {**settings(optimizer), _PARAMETERS: digest(own_N)}
        texts = texts_if_they_differ(optimizer.group, json.dumps(own, default=str), own_N.device)
        self._compared = now
        if texts is not None and optimizer.group.rank == 0 and not self._said:
            self._said = True
            differences = "; ".join(_differences([json.loads(text) for text in texts]))
            logger.warning("replicas_differ step=%d: %s: %s", optimizer.common_steps, differences, TO_DO)


def settings(optimizer: Algorithm[Any]) -> dict[str, Any]:
    """What every rank must step with alike, by name: plain numbers and lists."""
    found: dict[str, Any] = {
        "max_grad_norm": optimizer.max_grad_norm,
        "non_finite": optimizer.non_finite,
        "topology": optimizer.topology,
        "narrow": sorted(optimizer.narrow),
    }
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"{name} of group {index}": _plain(group[name]) for name in optimizer.defaults}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # as torch.optim takes a learning rate too
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _differences(everyone: list[dict[str, Any]]) -> list[str]:
    """Each thing in which some rank differs from rank 0, in words."""
    found = []
    for name, mine in everyone[0].items():
        others = [(rank, theirs.get(name)) for rank, theirs in enumerate(everyone) if theirs.get(name) != mine]
        if others and name == _PARAMETERS:
            found.append(f"{name} of ranks {[rank for rank, _ in others]} are not those of rank 0")
        elif others:
            found.append(f"{name} is {mine} on rank 0 and {others[0][1]} on rank {others[0][0]}")
    return found
