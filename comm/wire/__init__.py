"""What crosses the network: who sends how much to whom, headers included, what a link carries, and what it costs."""
