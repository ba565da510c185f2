"""What the host does in a step on a GPU, without one: microseconds of Python and of torch's dispatch."""
