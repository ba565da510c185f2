"""What is exchanged: means of vectors over ranks, in full or in one bit a value, and the error memory of the latter."""
