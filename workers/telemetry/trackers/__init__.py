"""What a run says to the tools in which people compare runs; docs/tracking.md."""
