"""With default settings only: does a compressed optimizer lose to its dense one, and what does it send? Nine tasks."""
