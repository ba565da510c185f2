"""Measurements that are too long for tests. Run from the root of the repository; not part of the installed package."""
