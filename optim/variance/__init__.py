"""The variance of an optimizer that compresses: when it is frozen, what is done for quiet elements, when it thaws."""
