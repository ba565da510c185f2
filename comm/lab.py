"""`from thinwire.comm.lab import Lab, LabSpec`, where the lab was before it had a room of its own: thinwire.lab."""

from thinwire.lab import Lab, LabSpec

__all__ = ["Lab", "LabSpec"]
