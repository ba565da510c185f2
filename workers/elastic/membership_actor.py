"""The actor that holds the membership server of a job, how many workers it wants, and the janitor.

It is detached and pinned to the head node: it outlives driver and controller, and no worker's node takes it along.
Ray restarts it when it dies; what it must not forget (limits, port, the generation, and whether anybody of it may still
commit) is in Ray's key-value store. Where nobody renews its lease it lets the workers go, waits until they
may have saved, then removes what is left of the job, and itself.

The worker group asks it at each poll over a MembershipLink, and never waits for it. Ray restarts it when it dies, and
the link when it was ended for good; meanwhile the last answer stands.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from thinwire.contract import logs
from thinwire.workers.elastic import leftovers
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.worker_side import Lease
from thinwire.workers.membership.attendance import LEASE_END_S, Timing
from thinwire.workers.membership.seats import Limits, MembershipEvent
from thinwire.workers.membership.server import MembershipServer
from thinwire.workers.nodes import own_address

logger = logging.getLogger(__name__)

JANITOR_S = 2.0
"""The janitor waits so much longer than a worker's lease and grace."""
HEAD = {"node:__internal_head__": 0.001}
START_S = 60.0
_KV = b"thinwire"
_ENDED = {"fenced", "failed", "lost", "refused", "dismissed"}


@dataclass(frozen=True)
class Gone:
    """A worker that is no member any more, whose process should have ended: for how long, and why."""

    since_s: float
    why: str


@dataclass(frozen=True)
class Headcount:
    """What the worker group must know at each poll.

    generation: 0 before the first. seated: slots of this one. step: the last that a member has reported. enough: there
    are as many as the job needs, those included that wait for the next generation. ids: of all that have connected, by
    slot and process.
    """

    target: int
    generation: int
    seated: frozenset[int]
    gone: dict[int, Gone]
    step: int = 0
    enough: bool = True
    ids: dict[tuple[int, int], str] = field(default_factory=dict)


class MembershipActor:
    """See the module. Ray calls its methods one at a time; a thread of the server's calls `_on_event`."""

    def __init__(self, plan: Plan) -> None:
        logs.set_up(fields={"job_id": plan.job})
        self._plan = plan
        self._key = f"{plan.namespace}/{plan.membership}".encode()
        self._owner: str | None = None
        self._gone: dict[int, tuple[float, str]] = {}
        self._ids: dict[tuple[int, int], str] = {}
        self._saving = threading.Lock()
        saved = json.loads(_internal_kv_get(self._key, namespace=_KV) or b"{}")
        self._limits = Limits(saved["min"], saved["max"]) if saved else plan.limits
        self._generation, self._vacant = int(saved.get("generation", 0)), bool(saved.get("vacant", True))
        self._port = int(saved.get("port", 0))
        self._known: dict[str, str] = saved.get("known", plan.known)
        # A driver's workers, and the members of a server before this one: who may still commit is waited for.
        self._server = self._open_server(0.0 if self._vacant else LEASE_END_S)
        self._save()
        self._wanted = Lease(plan.lease_s, self._let_all_go, repeats=True)  # another driver may come, and go too
        self._lease = Lease(plan.lease_s + plan.grace_s + JANITOR_S, self._clean_up)
        logger.info("membership_started job=%s address=%s limits=%s", plan.job, self._server.address, self._limits)

    def _open_server(self, quiet_s: float) -> MembershipServer:
        """quiet_s: how long somebody of the generation that was kept may still commit."""
        for port in dict.fromkeys((self._port, 0)):
            try:  # members look where it was, too, when nobody can say where it is
                server = MembershipServer(
                    self._limits,
                    self._plan.secret,
                    Timing(quiet_s=quiet_s),
                    host=own_address(self._plan.interface),
                    port=port,
                    after=self._generation,
                    keep=self._keep,
                    on_event=self._on_event,
                )
            except OSError as error:
                if not port:
                    raise
                logger.info("old_port_taken port=%d reason=%s", port, error)
            else:
                self._port = server.address[1]
                server.know(self._known)
                return server
        raise AssertionError("a free port is always tried")

    def _keep(self, generation: int, vacant: bool) -> None:
        """Before anybody hears of a generation. Called by the server, under its lock."""
        self._generation, self._vacant = generation, vacant
        self._save()

    def _save(self) -> None:
        with self._saving:
            state = {
                "min": self._limits.min,
                "max": self._limits.max,
                "port": self._port,
                "generation": self._generation,
                "vacant": self._vacant,
                "known": self._known,
            }
            _internal_kv_put(self._key, json.dumps(state).encode(), overwrite=True, namespace=_KV)

    def _on_event(self, event: MembershipEvent) -> None:
        slot = event.fields.get("slot")
        if isinstance(slot, int):
            if event.kind in _ENDED:
                self._gone[slot] = (time.monotonic(), f"{event.kind}: {event.fields.get('why')}")
            elif event.kind == "connected":
                self._gone.pop(slot, None)
                match event.fields:
                    case {"pid": int(pid), "id": str(id)}:
                        self._ids[slot, pid] = id

    def address(self) -> tuple[str, int]:
        """Where members connect."""
        return self._server.address

    def set_limits(self, low: int, high: int) -> None:
        """Want `high` workers, and train while there are `low`. Raises: ValueError unless 1 <= low <= high."""
        limits = Limits(low, high)
        self._server.set_limits(limits)
        self._limits = limits
        self._save()
        logger.info("limits min=%d max=%d", low, high)

    def dismiss(self, slot: int, reason: str) -> None:
        """Ask the worker of this slot to leave in order. Where so many are wanted, the group starts another."""
        self._server.dismiss(slot, reason)

    def bar(self, id: str, reason: str) -> None:
        """The worker group has given this worker up: it is to leave, and not to come back."""
        self._server.bar(id, reason)

    def snapshot(self) -> dict[str, Any]:
        """What the server knows, as JSON."""
        found: dict[str, Any] = self._server.snapshot().model_dump(mode="json")
        return found

    def renew_lease(self) -> None:
        """Somebody still wants this job."""
        self._renew()

    def _renew(self) -> None:
        self._wanted.renew()
        self._lease.renew()

    def claim(self, owner: str) -> None:
        """This run of a driver owns the job from now on: only it may `retire` it."""
        self._renew()
        self._owner = owner

    def know(self, known: dict[str, str]) -> None:
        """What the driver of this attempt knows of the signature of its workers: the job file may be another one."""
        self._known = known
        self._server.know(known)
        self._save()

    def begin(self) -> None:
        """Ray knows of no worker: a job that had finished begins again.

        One that had not goes on where it was: a worker that Ray has lost sight of may still live, and commit, and the
        server knows when that is over.
        """
        if self._server.snapshot().status == "finished":
            quiet_s, self._generation = self._server.vacant_in_s(), self._server.highest
            self._server.close()
            self._server = self._open_server(quiet_s)
            self._save()
        self._gone.clear()

    def headcount(self, barred: dict[str, str]) -> Headcount:
        """For the worker group, at each poll. Renews the lease. barred: every id that was barred, and why."""
        self._renew()
        for id, reason in barred.items():  # this actor may have been restarted since
            self._server.bar(id, reason)
        seen, now = self._server.snapshot(), time.monotonic()
        return Headcount(
            target=self._limits.max,
            generation=seen.generation,
            seated=frozenset(member.slot for member in seen.members),
            step=seen.last_step,
            enough=max(len(seen.members), seen.joined) >= self._limits.min,
            gone={slot: Gone(now - at, why) for slot, (at, why) in list(self._gone.items())},
            ids=dict(self._ids),
        )

    def retire(self, owner: str) -> bool:
        """The job is over: remove all of it but this actor. False where another run owns it by now."""
        if self._owner not in (None, owner):
            return False
        self._remove()
        return True

    def _let_all_go(self) -> None:
        """Nobody asks for the workers: they save together, and leave. In the lease's thread."""
        members = self._server.snapshot().members
        logger.warning("nobody_asks job=%s workers=%d", self._plan.job, len(members))
        for member in members:
            self._server.dismiss(member.slot, "nobody asks for this job any more")

    def _clean_up(self) -> None:
        """The janitor. In the lease's thread."""
        logger.warning("janitor job=%s reason=nobody renewed the lease", self._plan.job)
        self._remove()
        leftovers.kill(ray.get_runtime_context().current_actor)

    def _remove(self) -> None:
        self._server.close()
        leftovers.remove_all(self._plan)
        _internal_kv_del(self._key, namespace=_KV)


def ensure_membership(plan: Plan) -> Any:
    """The handle of the job's membership actor, which lives and answers; started where there is none.

    Raises: RayActorError or GetTimeoutError where it does not start in START_S.
    """
    until = time.monotonic() + START_S
    while True:
        handle = (
            ray.remote(MembershipActor)
            .options(
                name=plan.membership,
                namespace=plan.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                resources=HEAD,
                max_restarts=-1,
            )
            .remote(plan)
        )
        try:
            ray.get(handle.renew_lease.remote(), timeout=max(until - time.monotonic(), 1.0))
        except (RayActorError, GetTimeoutError):  # it was just being removed
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
        else:
            return handle


ANSWER_S = 0.1
"""It answers in a few milliseconds; a late answer is taken at the next poll."""


class MembershipLink:
    """For one worker group."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._handle: Any = None
        self._question: Any = None
        self._last: Headcount | None = None
        self._ids: dict[tuple[int, int], str] = {}
        self._barred: dict[str, str] = {}
        self._mending: threading.Thread | None = None

    def open(self, *, owner: str, living: int) -> None:
        """Find or start the actor, and say who asks. living: workers that are there. Raises: RayError."""
        self._handle = ensure_membership(self._plan)
        ray.get(self._handle.claim.remote(owner))
        if not living:
            ray.get(self._handle.begin.remote())

    def headcount(self) -> Headcount | None:
        """The last answer; None before the first."""
        if self._question is None:
            self._question = self._handle.headcount.remote(self._barred)
        if ray.wait([self._question], timeout=ANSWER_S)[0]:
            question, self._question = self._question, None
            try:
                self._last = ray.get(question)
                self._ids |= self._last.ids  # an actor that was restarted knows those alone that have come back
            except RayActorError as error:
                logger.warning("membership_away reason=%s", str(error).splitlines()[0])
                self._mend()
        return self._last

    def dismiss(self, slot: int, reason: str) -> None:
        """Ask the worker of this slot to leave. Nothing if it is no member; say it again until it is gone."""
        self._handle.dismiss.remote(slot, reason)

    def bar(self, slot: int, pid: int, reason: str) -> None:
        """This worker was given up: Ray was told to end it, but may not reach it. It must not train on unseen.

        Else it comes back as a member that the group does not know, and ends, with what only it may hold, when Ray
        reaches it or the group starts all again.
        """
        if (id := self._ids.get((slot, pid))) is not None:
            self._barred[id] = reason
            self._handle.bar.remote(id, reason)

    def _mend(self) -> None:
        if self._mending is None or not self._mending.is_alive():
            self._mending = threading.Thread(target=self._find, name="membership-mend", daemon=True)
            self._mending.start()

    def _find(self) -> None:
        try:
            self._handle = ensure_membership(self._plan)
        except RayError as error:
            logger.warning("membership_not_started reason=%s", str(error).splitlines()[0])
