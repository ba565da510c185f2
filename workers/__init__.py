"""Where training runs: the loop, and around it telemetry, elasticity, membership, checkpoints, data and recipes."""
