"""Real text as bytes, and which of them a step uses."""
