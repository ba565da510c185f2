"""What the control plane costs by the number of workers: python -m benchmarks.control_plane."""
