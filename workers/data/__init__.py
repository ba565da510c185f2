"""Real text and real images, and which of them a step uses."""
