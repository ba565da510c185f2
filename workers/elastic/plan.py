"""What an elastic job is: its names in Ray, how many workers it wants, and how patient it is."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from thinwire.workers.membership.seats import Limits

NAMESPACE = "thinwire"
"""Of all our actors. A driver's own namespace is anonymous, so that the next driver would not find them."""


@dataclass(frozen=True)
class Plan:
    """An elastic job.

    limits: at its start; the membership actor holds the present ones. attempt: which submission of the job; workers of
    an earlier one that are adopted belong to it from then on. known: of the signature of its workers, before there are
    any (workers/signature.py). lease_s: workers that no driver has asked for so long are let go by the membership, and
    save together. alone_s: a worker that neither a driver nor the membership has answered for so long ends, after
    grace_s. It commits nothing by then, and cannot save: so it waits much longer, for what it holds may be the last.
    leave_s: how long the process of a worker may go on that is no member any more. A slot that
    dies more than max_early_deaths times in a row within early_s of its start
    ends the job.
    Of errors of train functions (failures.py): a slot is filled again max_slot_failures times within failures_s. Three
    times is no accident, and each costs the others a regroup. All slots together: max_job_failures times, for a fault
    that moves from worker to worker. A step is tried by tries_of_step generations: the first may have had a bad
    machine, and the second the next one.
    interface: of the network, at which the membership listens; None: that of the node's address.
    """

    job: str
    secret: str = field(repr=False)
    limits: Limits
    attempt: int = 0
    lease_s: float = 10.0
    alone_s: float = 300.0
    grace_s: float = 5.0
    leave_s: float = 30.0
    early_s: float = 30.0
    max_early_deaths: int = 6
    max_slot_failures: int = 3
    max_job_failures: int = 12
    failures_s: float = 3600.0
    tries_of_step: int = 3
    interface: str | None = None
    namespace: str = NAMESPACE
    known: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.job):
            raise ValueError(f"job = {self.job!r} becomes part of actor names: use letters, digits, _, . and - only")
        for name in ("lease_s", "alone_s", "grace_s", "leave_s", "early_s", "failures_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be above 0: give seconds")

    @property
    def controller(self) -> str:
        """The actor name of Ray Train's controller."""
        return f"{self.job}/controller"

    @property
    def membership(self) -> str:
        """The actor name of the membership actor."""
        return f"{self.job}/membership"

    def worker(self, slot: int) -> str:
        """The actor name of a slot's worker. One name a slot: there can be no two."""
        return f"{self.job}/w{slot}"

    def slot_of(self, actor: str) -> int | None:
        """The slot of a worker's actor name; None for any other name."""
        found = re.fullmatch(re.escape(self.job) + r"/w(\d+)", actor)
        return int(found[1]) if found else None

    def new_unit(self, slot: int) -> str:
        """A name for a placement group of this slot: a new one each time, for removal takes a while."""
        return f"{self.job}/u{slot}/{uuid.uuid4().hex[:8]}"

    def is_unit(self, placement_group: str) -> bool:
        """Whether a placement group of this name is one of ours."""
        return re.fullmatch(re.escape(self.job) + r"/u\d+/[0-9a-f]{8}", placement_group) is not None

    def facts(self, slot: int) -> dict[str, Any]:
        """What the train function of this slot finds in config["elastic"]."""
        return {
            "job": self.job,
            "namespace": self.namespace,
            "slot": slot,
            "secret": self.secret,
            "membership": self.membership,
        }
