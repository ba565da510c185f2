"""One cell: a case done to our optimizer and to torch's, and what is wrong with what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from tests.optim.anyones_loop.cases import Cell, When
from tests.optim.anyones_loop.loop import WARMUP, Loop, ours, theirs
from tests.optim.seeded import seeded
from thinwire.comm import CommError
from thinwire.comm.protocol import Group

STEPS = 18
DONE_AFTER = {When.UNMADE: 0, When.MADE: 0, When.WARMUP: WARMUP // 2, When.COMPRESSED: WARMUP + 5}
"""Steps before it is done. The last is between two syncs of 0/1 Adam."""
EXACT = {"adam": 2e-6, "sgd": 2e-6}
"""Of optimizers that take torch's steps: how far a parameter may be from torch's, by rounding alone."""
FALL = 0.4
"""Of the others: how much of the fall of the logarithm of AdamW's loss, since then, theirs has at least."""
MOVED = 0.1
"""How far each tensor has moved since then, at least, of the distance that torch's has."""
CLEAR = (ValueError, TypeError, RuntimeError, CommError)
"""What a user learns of an error by."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a rank's user holds at last. values, moved: of each tensor that is trained, by name.

    moved: since it was done. before: the loss when it had been done.
    """

    values: dict[str, Tensor]
    moved: dict[str, float]
    before: float
    loss: float


def by_torch(cell: Cell, group: Group) -> Trained:
    """The measure of this cell."""
    none_is_zero = cell.case.none_is_zero
    return _trained(cell, group, lambda params: theirs(cell.optimizer, params, group, none_is_zero=none_is_zero))


def by_us(cell: Cell, group: Group) -> Trained | Exception:
    """What our optimizer makes of it: the error where it raises one."""
    try:
        return _trained(cell, group, lambda params: ours(cell.optimizer, params, group, overlap=cell.overlap))
    except CLEAR as error:
        return error


def _trained(cell: Cell, group: Group, make: Callable[[Iterable[Any]], Any]) -> Trained:
    loop = Loop(seeded(0, cell.case.net), group, make)
    if cell.when is When.UNMADE:
        cell.case.do(loop)
    loop.make_optimizer()
    loop.train(DONE_AFTER[cell.when])
    if cell.when is not When.UNMADE:
        cell.case.do(loop)
    start = {name: param.detach().clone() for name, param in loop.net.named_parameters()}
    before = loop.evaluate()
    loop.train(STEPS - loop.step)
    if hasattr(loop.optimizer, "prepare_to_save"):
        loop.optimizer.prepare_to_save()
    for check in loop.at_end:
        check()
    values = {name: param.detach().clone() for name, param in loop.net.named_parameters() if param.requires_grad}
    moved = {name: float((value - start[name]).norm()) for name, value in values.items()}
    return Trained(values, moved, before, loop.evaluate())


def faults(cell: Cell, found: Trained | Exception, measure: Trained | None, group: Group) -> list[str]:
    """What is wrong with it, in words; nothing where the cell has its answer. Collective where it has trained.

    measure: torch's, where it has trained.
    """
    expected = cell.expected
    if isinstance(found, Exception):
        if expected is None:
            return [f"raised {type(found).__name__}: {found}"]
        missing = [words for words in (expected.words, expected.way) if words not in str(found)]
        return [f"raised {type(found).__name__}: {found}, without {missing}"] if missing else []
    wrong = [] if _are_replicas(found, group) else ["ranks hold different models"]
    if expected is not None and not expected.perhaps:
        wrong.append(f"raised nothing, in place of an error with {expected.words!r}")
    return wrong + ([] if measure is None else [*_differences(cell, found, measure)])


def _are_replicas(found: Trained, group: Group) -> bool:
    own = torch.cat([value.float().reshape(-1) for value in found.values.values()])
    first = own.clone()
    group.broadcast_(first)
    same = torch.tensor([float(torch.equal(own, first))])
    group.mean_(same)
    return bool(same == 1)


def _differences(cell: Cell, found: Trained, measure: Trained) -> Iterable[str]:
    idle = [name for name, moved in measure.moved.items() if not moved]
    if idle and not cell.case.idles:
        yield f"torch's optimizer does not train {idle}, and neither should ours without an error"
    for name, moved in found.moved.items():
        if name in idle and not moved:
            continue
        if not MOVED * measure.moved[name] <= moved <= measure.moved[name] / MOVED:
            yield f"{name} has moved by {moved:.2e}, torch's by {measure.moved[name]:.2e}"
    if cell.optimizer in EXACT:
        far = {name: float((value - measure.values[name]).abs().max()) for name, value in found.values.items()}
        worst = max(far, key=lambda name: far[name])
        if not far[worst] <= EXACT[cell.optimizer]:
            yield f"{worst} is {far[worst]:.2e} from torch's"
        return
    fall, theirs_fall = (log(one.before / one.loss) for one in (found, measure))
    if not fall > FALL * theirs_fall:
        yield f"its loss fell from {found.before:.4f} to {found.loss:.4f}, AdamW's to {measure.loss:.4f}"
