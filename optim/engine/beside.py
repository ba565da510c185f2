"""What is trained beside an optimizer of thinwire, by another one or by hand: nothing averages its gradients.

Under DistributedDataParallel all gradients of a model are averaged, whoever steps them. Here each optimizer brings its
own together, so that parameters of a second one (Muon for matrices, SparseAdam for rows) drift apart between ranks.
Who averages them by hand does right, and some parameters are to be each rank's own. So nothing is refused: the values
are compared with those of the other ranks (replicas.py), which shows what has drifted apart and nothing else.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.buffers import excepted_of
from thinwire.optim.engine.local import local, named_parameters
from thinwire.optim.engine.parameters import digest, is_cut, named_as_trained

_threads = threading.local()


@functools.cache
def watch() -> None:
    """From here on note which optimizers step, in each thread; refuse what gives each rank a part to step."""
    register_optimizer_step_pre_hook(_note)


def digests(optimizer: Algorithm[Any]) -> dict[str, dict[str, list[int]]]:
    """Of what is trained beside it in this thread: by whom, in words, then by name, the digest of a parameter.

    Known are the optimizers that have stepped, and of model= what requires a gradient and no optimizer holds.
    """
    stepped = list(_stepped())
    ours = [one for one in stepped if isinstance(one, Algorithm)]
    named = {} if optimizer.model is None else named_parameters(optimizer.model)
    held = {id(param) for one in (optimizer, *ours) for param in _params(one)}
    held |= {id(named[name]) for name in excepted_of(optimizer.model) if name in named}
    names = {id(param): named_as_trained(name) for name, param in named.items()}
    found: dict[str, dict[str, list[int]]] = {}
    # The largest first: what holds a part of another's parameters is inside of that, as in ZeroRedundancyOptimizer.
    others: list[tuple[str, list[Tensor]]] = [
        (type(one).__name__, list(_params(one))) for one in stepped if not isinstance(one, Algorithm)
    ]
    others.sort(key=lambda other: -len(other[1]))
    trained: list[tuple[str, list[Tensor]]]
    trained = [(f"{kind} ({at}) steps parameters that", params) for at, (kind, params) in enumerate(others, 1)]
    unheld: list[Tensor] = [param for param in named.values() if param.requires_grad]
    trained.append(("model= has parameters that no optimizer steps, and that", unheld))
    for who, params in trained:
        beside = [param for param in params if id(param) not in held and _is_whole(param)]
        held |= {id(param) for param in beside}
        if beside:
            found[who] = {
                names.get(id(param), f"parameter {at}, {tuple(param.shape)}"): digest(param)
                for at, param in enumerate(beside)
            }
    return found


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # a compiled step is traced through this
        return
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" and isinstance(inner := optimizer.optim, Algorithm):  # type: ignore[attr-defined]
        raise RuntimeError(
            f"ZeroRedundancyOptimizer(optimizer_class={type(inner).__name__}) gives each rank other parameters, and "
            "this optimizer exchanges those of all ranks as if they were the same: make it over all of them, without "
            'ZeroRedundancyOptimizer (narrow=("variance", "error_memory") takes less memory)'
        )
    _stepped()[optimizer] = None


def _stepped() -> weakref.WeakKeyDictionary[Optimizer, None]:
    """The optimizers that have stepped in this thread, in order: ranks may be threads."""
    if not hasattr(_threads, "stepped"):
        _threads.stepped = weakref.WeakKeyDictionary()
    return _threads.stepped  # type: ignore[no-any-return]


def _params(optimizer: Any) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _is_whole(param: Tensor) -> bool:
    """Is what it has of it in a form whose bits can be read?"""
    param = local(param)
    dense = param.layout == torch.strided and not param.is_meta and param.dtype.is_floating_point
    return dense and param.element_size() > 1 and param.numel() > 0 and not is_cut(param)
