"""Launchers: how a job's processes come to be. One protocol, several back ends."""
