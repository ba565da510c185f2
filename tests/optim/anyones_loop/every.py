"""All cases, in the order of the page: each of these modules puts its own on the list."""

from tests.optim.anyones_loop import memory, weights, gradients, groups, parts, steps  # isort: skip
from tests.optim.anyones_loop.cases import CASES

__all__ = ["CASES", "gradients", "groups", "memory", "parts", "steps", "weights"]
