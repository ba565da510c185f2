"""A check, now and then, that all ranks hold the same parameters and step with the same settings; logged.

Nothing brings replicas together again that have drifted apart: a learning rate that follows each rank's own loss,
weights written on one rank, two threads on one process group. Every rank would train on, and none would know.

A warning and no error: machines of two kinds may round differently, and train well. 16 bytes a rank, every EVERY steps,
and sooner where something has changed. What is trained beside the optimizer is compared too (beside.py).
"""

from __future__ import annotations

import json
import logging
from typing import Any

from torch import Tensor

from thinwire.comm.calls import CallsCompared
from thinwire.optim.engine import beside
from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.first_step import Beside
from thinwire.optim.engine.parameters import digest

logger = logging.getLogger(__name__)

EVERY = 100
"""Steps from one comparison to the next. It reads the parameters twice, which is little beside so many steps."""
EARLY = (1, 10)
"""Steps after the ranks have begun, or their parameters have changed, of which the next compares too."""
TO_DO = (
    "nothing brings these ranks together again. Give all the same learning rate and settings (a ReduceLROnPlateau the "
    "loss averaged over ranks), write weights alike on every rank (a perturbation, as of SAM, is put back by "
    "p.copy_(old) and not subtracted; what reads p.grad finds this rank's own there, "
    'unless optimizer.gradients = "mean"), and step a process group\'s optimizers from one thread; then go on from a '
    "checkpoint of before"
)
TO_DO_BESIDE = (
    "nothing averages the gradients of what no optimizer of thinwire holds, as DistributedDataParallel would. Give it "
    "to this optimizer, as a parameter group of its own where it needs other settings, or to a second one of "
    "thinwire.optim; or all_reduce its gradients before it is stepped (docs/own-loop.md#a-second-optimizer)"
)
_PARAMETERS = "parameters"
_BESIDE = "beside"


class Replicas:
    """Compared over the ranks of one exchange: as it begins in the middle of a run, for then parameters came or went;

    after EARLY steps; when the variance has been frozen, for then p.grad is another one; and every EVERY steps.
    """

    def __init__(self) -> None:
        self._since: int | None = None
        self._mark: tuple[object, ...] = ()
        self._begun: tuple[int, CallsCompared] | None = None
        self._said: set[str] = set()

    def begin(self, optimizer: Algorithm[Any]) -> None:
        """Where it is time: send a checksum of all that is compared; end() looks at those of the others. Collective."""
        now = optimizer.common_steps
        begins = self._since is None
        self._since = now if self._since is None else self._since
        mark = self._now(optimizer, self._since)
        if optimizer.group.size == 1 or mark == self._mark or (begins and not now):
            self._mark = mark
            return
        own_N = optimizer.common_parameters
        own = {**settings(optimizer), _PARAMETERS: digest(own_N), _BESIDE: beside.digests(optimizer)}
        calls, text = optimizer.calls, json.dumps(own, default=str)
        # A rank in another call may gather as many bytes there.
        self._begun = now, CallsCompared(optimizer.group, calls.now, own_N.device, remedy=calls.remedy, more=text)
        self._mark = mark

    def end(self, optimizer: Algorithm[Any]) -> None:
        """Say once, on rank 0, what differs. Collective where begin() was. Raises: PeerLost, CallMismatch."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        now, compared = begun
        texts = compared.differing()
        if texts is None or optimizer.group.rank:
            return
        everyone = [json.loads(text) for text in texts]
        of_others = [one.pop(_BESIDE) for one in everyone]
        self._say(now, _differences(everyone), TO_DO)
        self.say_beside(optimizer, of_others)

    def say_beside(self, optimizer: Algorithm[Any], everyone: list[Beside]) -> None:
        """everyone: beside.digests() of each rank, or nothing. Say once, on rank 0, what has drifted apart. Local."""
        if everyone and optimizer.group.rank == 0:
            self._say(optimizer.common_steps, _differences_beside(everyone), TO_DO_BESIDE)

    def resumed(self, optimizer: Algorithm[Any]) -> None:
        """Go on as the run that saved does, so that a step of either sends the same. Local."""
        self._since = 0
        self._mark = self._now(optimizer, 0)

    def _now(self, optimizer: Algorithm[Any], since: int) -> tuple[object, ...]:
        """What changes where it is time."""
        now = optimizer.common_steps
        froze = optimizer.frozen_at is not None and now > optimizer.frozen_at
        return (*(now - since >= early for early in EARLY), froze, now // EVERY)

    def _say(self, step: int, differences: list[str], what_to_do: str) -> None:
        if differences and what_to_do not in self._said:
            self._said.add(what_to_do)
            logger.warning("replicas_differ step=%d: %s: %s", step, "; ".join(differences), what_to_do)


def settings(optimizer: Algorithm[Any]) -> dict[str, Any]:
    """What every rank must step with alike, by name: plain numbers and lists."""
    found: dict[str, Any] = {
        "max_grad_norm": optimizer.max_grad_norm,
        "non_finite": optimizer.non_finite,
        "topology": optimizer.topology,
        "narrow": sorted(optimizer.narrow),
        **optimizer.own_settings(),
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


def _differences_beside(everyone: list[Beside]) -> list[str]:
    """Of each that trains something beside on every rank: the first parameter that some rank has otherwise, in words.

    What has other names or shapes there is meant to be each rank's own.
    """
    found = []
    for who, mine in everyone[0].items():
        if any(theirs.get(who, {}).keys() != mine.keys() for theirs in everyone):
            continue
        differ = {name: [r for r, theirs in enumerate(everyone) if theirs[who][name] != mine[name]] for name in mine}
        names = [name for name, ranks in differ.items() if ranks]
        if names:
            others = f"{len(names)} of {len(mine)}, the first is {names[0]!r} on ranks {differ[names[0]]}"
            found.append(f"{who} ranks do not hold alike ({others})")
    return found
