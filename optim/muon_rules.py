"""Which rule of muon_math each parameter gets: as its group says, else by what it is in the model, else by its shape.

    fewer than two dimensions, or one that is not 1              vector
    a table of nn.Embedding or nn.EmbeddingBag; what is named so rows        also where a head is tied to it
    an output head: by its name, or the last linear layer        rows        that is not square, where no other is known
    more than two dimensions, of no convolution                  matrices    where model= is given
    all else                                                     matrix

Without model= tables and heads are known by the names that parameters were given with, and by their shapes. Shapes are
not asked where the model is known: a layer may have the very shape of a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from thinwire.optim.engine.parameters import names_of
from thinwire.optim.muon_math import RULES

TABLES = ("embed", "wte", "wpe", "tok_emb", "pos_emb", "position", "bytes")
HEADS = ("head", "lm_head", "classifier", "score", "decoder", "embed_out", "output_projection")
"""How names of tables begin, and what output heads are called: the last two parts of a parameter's name."""
DIMENSIONS = {"matrix": 1, "matrices": 2, "rows": 1, "vector": 0}
"""The least that a tensor must have for a rule."""
TALL, MANY = 6, 8192
"""A matrix of so many rows, and so many times as many as columns, is taken for a table where nothing else is known."""


def check_rule(rule: object, params: Iterable[Tensor]) -> None:
    """Raises: ValueError for a group's rule that is none, or that a parameter of it cannot have. None: it is found."""
    if rule is None:
        return
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"rule = {rule!r}: must be one of {', '.join(RULES)}, or None, by which it is found")
    least = DIMENSIONS.get(rule, 0)
    short = next((tuple(param.shape) for param in params if not is_lazy(param) and param.dim() < least), None)
    if short is not None:
        raise ValueError(
            f"rule = {rule!r} of a parameter of shape {short}: it is for tensors of at least {least} "
            f"dimension{'s' if least > 1 else ''}; leave this parameter to a group without a rule"
        )


def rules_of(param_groups: Sequence[dict[str, Any]], model: nn.Module | None) -> dict[Tensor, str]:
    """The name of the rule of each parameter."""
    found: dict[Tensor, str] = {}
    known = {} if model is None else _of_modules(model)
    names = iter(names_of(param_groups, model))
    for group in param_groups:
        for param in group["params"]:
            name = next(names)
            found[param] = group.get("rule") or _found(param, name, known)
    return found


def refuse_vectors(param_groups: Sequence[dict[str, Any]], rules: dict[Tensor, str]) -> None:
    """Raises: ValueError where there is no matrix, and no group says that this is meant."""
    is_said = any(group.get("rule") for group in param_groups)
    if not is_said and all(rule == "vector" for rule in rules.values()):
        shapes = Counter(tuple(param.shape) for param in rules)
        raise ValueError(
            f"none of the {len(rules)} parameters is a matrix, which is what Muon is for; their shapes are "
            f"{', '.join(map(str, list(shapes)[:5]))}: give it all of model.parameters(), train these by "
            "OneBitAdam(params, lr=...), or say so: [{'params': params, 'rule': 'vector'}]"
        )


def _found(param: Tensor, name: str | None, known: dict[int, str]) -> str:
    if is_lazy(param):  # it is refused where vectors are laid out
        return "matrix"
    if sum(size > 1 for size in param.shape) < 2 and not (param.dim() == 2 and param.numel() > 1):
        return "vector"
    rule = known.get(id(param))
    if rule is not None and rule != "matrices":
        return rule
    parts = [] if name is None else name.split(".")[-2:]
    if any(part in HEADS or part.startswith(TABLES) for part in parts):
        return "rows"
    is_table = param.dim() == 2 and param.shape[0] >= max(MANY, TALL * param.shape[1])
    return rule or ("rows" if is_table and not known else "matrix")


def _of_modules(model: nn.Module) -> dict[int, str]:
    """Of parameters that belong to a module which says what they are, by id; "matrices": where no name says more."""
    found: dict[int, str] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            of_conv = isinstance(module, _ConvNd)
            if of_conv or param.dim() > 2:
                found.setdefault(id(param), "matrix" if of_conv else "matrices")
    linear = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
    heads = {id(one.weight) for name, one in linear if name.split(".")[-1] in HEADS or id(one.weight) in tables}
    if not heads and len(linear) > 1 and linear[-1][1].in_features != linear[-1][1].out_features:
        heads = {id(linear[-1][1].weight)}
    found |= {id(one.weight): "matrix" for _, one in linear}
    return found | dict.fromkeys(tables | heads, "rows")
