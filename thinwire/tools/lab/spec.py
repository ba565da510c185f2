"""What is asked of a lab: hosts and links; and its errors."""

from __future__ import annotations

import math
from dataclasses import dataclass


class LabError(Exception):
    """A lab cannot be made or used here. The message says what is missing and how to get it."""


class LabRunFailed(LabError):
    """A command in the lab failed or ran out of time. The message holds the end of what the rank wrote."""


MAX_HOSTS = 128
MIN_RATE_MBIT, MAX_RATE_MBIT = 1.0, 100_000.0
FAST_MBIT = 1000.0
DEFAULT_DELAY_MS = 0.1


@dataclass(frozen=True)
class LabSpec:
    """Hosts that are joined by one switch, each by a link of its own.

    hosts: network namespaces, 1 to 128. rate_mbit: of each link and direction, in 10^6 bit/s of Ethernet frames.
    delay_ms: from host to host, one way; not given: 0.1, and 0 above 1000 Mbit/s (its timers cost CPU that such a rate
    needs). loss: probability of losing a frame between two hosts; needs a kernel with netem.
    ranks_per_host: processes of lab.run() that share a host and its link, a "box" of so many GPUs.
    second_network: each host has eth1 too, unshaped, by which it reaches the others: what is sent there is seen.

    Raises: ValueError with the field, the value and what is allowed.
    """

    hosts: int
    rate_mbit: float
    delay_ms: float = None  # type: ignore[assignment]  # replaced below, so that a reader always finds a number
    loss: float = 0.0
    ranks_per_host: int = 1
    second_network: bool = False

    def __post_init__(self) -> None:
        if self.delay_ms is None:
            object.__setattr__(self, "delay_ms", DEFAULT_DELAY_MS if self.rate_mbit <= FAST_MBIT else 0.0)
        _whole("hosts", self.hosts, 1, MAX_HOSTS)
        _whole("ranks_per_host", self.ranks_per_host, 1, 1024)
        _number("rate_mbit", self.rate_mbit, MIN_RATE_MBIT, MAX_RATE_MBIT)
        _number("delay_ms", self.delay_ms, 0.0, 1000.0)
        _number("loss", self.loss, 0.0, 0.5)

    @property
    def world_size(self) -> int:
        """Ranks of all hosts together."""
        return self.hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """The host that a rank runs on: ranks fill host 0 first."""
        return rank // self.ranks_per_host


def _whole(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} = {value!r}: must be a whole number from {least} to {most}")


def _number(name: str, value: float, least: float, most: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        raise ValueError(f"{name} = {value!r}: must be a number from {least:g} to {most:g}")
