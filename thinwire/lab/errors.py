"""What can go wrong with a lab."""

from __future__ import annotations


class LabError(Exception):
    """A lab cannot be made or used here. The message says what is missing and how to get it."""


class LabRunFailed(LabError):
    """A command in the lab failed or ran out of time. The message holds the end of what the rank wrote."""
