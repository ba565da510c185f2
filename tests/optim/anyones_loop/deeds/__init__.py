"""The deeds, by what they are done to. Importing this puts all of them on the list."""

from tests.optim.anyones_loop.deeds import copies, gradients, memory, optimizer, parts, steps, training

__all__ = ["copies", "gradients", "memory", "optimizer", "parts", "steps", "training"]
