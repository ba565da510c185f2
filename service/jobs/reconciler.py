"""Brings what runs and what the database believes together, again and again, in a thread of its own.

A turn reads the jobs that are not over, sees which of them have places in the cluster (admission.py), has the launcher
asked about each (calls.py: beside one another, one call a job), decides (decide.py) and applies, many jobs in a
transaction. What has not been answered soon is left under way and applied when it comes; nobody waits for it. No call
is made inside a transaction; a job that has moved between the reading and the applying is left to the next turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm.exc import StaleDataError

from thinwire.contract.jobs import JobState
from thinwire.contract.labels import in_metadata
from thinwire.contract.projects import DEFAULT
from thinwire.contract.remote_run import LONGEST_LOG_BYTES
from thinwire.contract.reports import EventKind, Failure
from thinwire.contract.script import ScriptRecipe
from thinwire.service.auth import new_token, token_hash
from thinwire.service.db import Database
from thinwire.service.errors import NotOwner
from thinwire.service.jobs.admission import NEW, Admission, recalled
from thinwire.service.jobs.asked import NOTHING_WRITTEN, Asked, Written
from thinwire.service.jobs.calls import SLOW_S, Answer, Calls
from thinwire.service.jobs.decide import (
    Action,
    Cancel,
    Fail,
    JobView,
    Retry,
    Run,
    StopRun,
    Submit,
    Succeed,
    Wait,
    decide,
)
from thinwire.service.jobs.job_folder import RunFolders
from thinwire.service.jobs.repository import JobRepository, JobRow, LeaseRow, last_step, storable, transition_all
from thinwire.service.jobs.views import job_json, submission_id
from thinwire.service.jobs.worker_numbers import limits_now, wanted_workers, write_wanted
from thinwire.service.launch.driver import ticket_of
from thinwire.service.launch.protocol import Code, Launcher, LauncherError, LaunchState, LaunchStatus
from thinwire.service.packages.store import PackageGone, Packages

logger = logging.getLogger(__name__)

RESTS, LONGEST_REST_S = 10.0, 5.0
"""A turn begins so many times later than the last one as that took of a core, so that it takes a tenth of one; but no
later than that: a launcher that is not asked for long counts as one that does not answer, and an alert looks too."""
AT_ONCE = 16
"""Calls of a kind beside one another."""
MOST_QUESTIONS, MOST_SUBMITS = 64, 32
"""Calls of a kind, those included that hang."""
A_TRANSACTION = 100
"""Jobs that are moved in one transaction: requests that write wait for it."""
EXPLAINED_AFTER_S = 10.0
"""A submit that has not been answered for so long is given as the reason why the job waits."""
WRITTEN_AGAIN_S = 60.0
"""Other words for what pods wait for are written after so long; the first at once."""
_READY, _PRUNE = "the launcher itself", "what need not be kept"


_LIVE = frozenset({LaunchState.PENDING, LaunchState.RUNNING})
_OVER = frozenset({LaunchState.SUCCEEDED, LaunchState.FAILED, LaunchState.STOPPED})


class Reconciler:
    """Follows every job to its end.

    look: asks whether the launcher can be used: None, else why not; it may block. clock: unix seconds.
    confirm_owner: raises NotOwner where another service owns the database.
    observe_turn: called with the seconds of each turn. prune: deletes what need not be kept; called in each turn.
    log_room: how many bytes more are kept of a job.
    """

    patience_s = SLOW_S
    """How long a turn waits for an answer, and for those to what it asked of all jobs."""

    def __init__(
        self,
        db: Database,
        launcher: Launcher,
        folders: RunFolders,
        *,
        packages: Packages,
        look: Callable[[], str | None],
        confirm_owner: Callable[[], None],
        clock: Callable[[], float],
        interval_s: float,
        observe_turn: Callable[[float], None] = lambda seconds: None,
        prune: Callable[[], None] = lambda: None,
        log_room: Callable[[str], int] = lambda job_id: LONGEST_LOG_BYTES,
    ) -> None:
        self._db = db
        self._launcher = launcher
        self._folders = folders
        self._packages = packages
        self.admission = Admission(db, launcher, folders, clock)
        self._look = look
        self._confirm_owner = confirm_owner
        self._clock = clock
        self._interval_s = interval_s
        self._observe_turn = observe_turn
        self._prune, self._log_room = prune, log_room
        self._absent: dict[str, int] = {}
        self._slow: set[str] = set()
        self._asked_in: dict[str, int] = {}
        self._waits: dict[str, Written] = {}
        self._leases_at, self._leases_ahead_s = clock(), 0.0
        self._warned: dict[tuple[str, str], str] = {}
        self._turns = 0
        self._wake = threading.Event()
        self._due = threading.Event()
        self._stop = threading.Event()
        self._submits: Calls[Asked] = Calls(AT_ONCE, MOST_SUBMITS, answered=self._wake.set)
        self._questions: Calls[Asked] = Calls(AT_ONCE, MOST_QUESTIONS, answered=self._wake.set)
        self._others: Calls[str | None] = Calls(2, 2)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to turn, in a thread."""
        self._thread = threading.Thread(target=self._loop, name="thinwire-reconciler", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Turn soon: something has changed."""
        self._due.set()
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._stop.set()
        self._wake.set()

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after the turn it is in. Safe to call twice."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("reconciler_still_busy timeout_s=%g", timeout_s)
        for calls in (self._submits, self._questions, self._others):
            calls.close()

    def turn(self) -> None:
        """One pass over every job that is not over. An error with one job does not keep the others waiting.

        Raises: NotOwner where another service owns the database.
        """
        self._turns += 1
        self._confirm_owner()
        self.apply_answers()
        self._drop_expired_leases()
        with self._db.read() as session:
            rows = JobRepository(session).unfinished()
        known = {row.id for row in rows}
        self._absent = {job: polls for job, polls in self._absent.items() if job in known}
        self._asked_in = {job: turn for job, turn in self._asked_in.items() if job in known}
        self._slow &= known
        self._waits = {job: last for job, last in self._waits.items() if job in known}
        self._warned = {key: said for key, said in self._warned.items() if key[1] in known}
        rows = [row for row in rows if self._keep_wanted(row)]
        unready = self._unready()  # without jobs as well: requests are answered from the last look
        if rows and not self._stop.is_set():
            new = [row for row in rows if row.state in NEW]
            if unready is not None:
                self._explain(dict.fromkeys(new, unready))
            else:
                rows, why = self.admission.turn(rows)
                admitted = {row.id for row in rows}
                if why is not None:
                    self._explain({row: why for row in new if row.id not in admitted})
                self._ask(rows)
                self._explain_open(row for row in new if row.id in admitted)
        self._others.start(_PRUNE, self._pruned)
        self._others.wait([_PRUNE], self._soon())
        self._others.answers()

    def apply_answers(self) -> None:
        """Apply what the launcher has answered since it was last looked at. Raises NotOwner."""
        answers = [*self._submits.answers(), *self._questions.answers()]
        found = [asked for answer in answers if (asked := self._heard(answer)) is not None]
        self._explain({asked.row: asked.refusal for asked in found if asked.refusal is not None})
        self._write_waits(found)
        moves = [asked for asked in found if asked.refusal is None and _moves(asked.action)]
        for first in range(0, len(moves), A_TRANSACTION):
            self._move_all(moves[first : first + A_TRANSACTION])
        if any(isinstance(asked.action, Retry) for asked in moves):
            self.wake()

    def _loop(self) -> None:
        next_turn = time.monotonic()
        while not self._stop.is_set():
            self._wake.clear()
            began, spent = time.monotonic(), time.thread_time()
            try:
                if self._due.is_set() or began >= next_turn:
                    self._due.clear()
                    next_turn = began + self._interval_s
                    self.turn()
                    self._observe_turn(time.monotonic() - began)
                    rest_s = min(RESTS * (time.thread_time() - spent), LONGEST_REST_S)
                    next_turn = max(next_turn, began + rest_s)
                else:
                    self.apply_answers()
            except NotOwner as error:
                logger.warning("reconcile_refused error=%s", error)
            except OperationalError:
                logger.exception("reconcile_failed where=database")
            except Exception:
                logger.exception("reconcile_failed where=turn")
            self._wake.wait(max(0.0, next_turn - time.monotonic()))

    # asking

    def _soon(self) -> float:
        """Until when to wait for what begins now, as time.monotonic() counts. A turn that is to end waits no more."""
        return time.monotonic() + (0.0 if self._stop.is_set() else self.patience_s)

    def _unready(self) -> str | None:
        """Why the launcher cannot be used; one that does not say so soon is not waited for."""
        self._others.start(_READY, self._looked)
        if not self._others.wait([_READY], self._soon()):
            return "it does not answer"
        for answer in self._others.answers():
            if answer.key == _READY:
                if answer.error is not None:
                    raise answer.error
                return answer.result
        return "the system gives no thread to ask it in"

    def _looked(self) -> str | None:
        reason = self._look()
        if reason is None:
            self.admission.look()
        return reason

    def _pruned(self) -> None:
        try:
            self._prune()
        except Exception:
            logger.exception("prune_failed")

    def _ask(self, rows: Sequence[JobRow]) -> None:
        """Have the launcher asked about every job that it is not being asked about, and apply what it says in time."""
        in_turn = sorted(rows, key=lambda row: self._asked_in.get(row.id, 0))  # those that found no room come first
        new = deque(row for row in in_turn if row.state in NEW)
        old = deque(row for row in in_turn if row.state not in NEW)
        until = self._soon()
        begun: dict[Calls[Asked], set[str]] = {self._submits: set(), self._questions: set()}
        while not self._stop.is_set():
            for calls, lane in ((self._submits, new), (self._questions, old)):
                while lane and (self._under_way(lane[0]) or self._begin(calls, lane[0], begun[calls])):
                    lane.popleft()
            full = next((calls for calls, lane in ((self._questions, old), (self._submits, new)) if lane), None)
            if full is None or not full.wait_for_one(until):
                break
        for calls, jobs in begun.items():
            calls.wait(jobs - self._slow, until)
        self.apply_answers()

    def _begin(self, calls: Calls[Asked], row: JobRow, begun: set[str]) -> bool:
        ask = self._submit if calls is self._submits else self._question
        if not calls.start(row.id, lambda: ask(row)):
            return False
        self._asked_in[row.id] = self._turns
        begun.add(row.id)
        return True

    def _under_way(self, row: JobRow) -> bool:
        return self._submits.age(row.id) is not None or self._questions.age(row.id) is not None

    def _submit(self, row: JobRow) -> Asked:
        """Hand the job to the launcher. In a thread of its own."""
        unknown = LaunchStatus(LaunchState.UNKNOWN)
        if not self._ready_folder(row):
            return Asked(row, Wait(), unknown)
        named = {"job_id": row.id, "job_name": row.name, "attempt": str(row.attempt)}
        project = {} if row.project == DEFAULT else {"project": row.project}
        metadata = {**named, **project, **in_metadata(row.labels)}
        submission = submission_id(row.id, row.attempt)
        self._confirm_owner()
        if not self._launcher.own_cluster:
            self._draw_ticket(row)
        refusal = None
        try:
            code = self._code(row)
            with self._folders.handing_over(row.id, row.created_at, row.attempt):
                self._launcher.submit(submission, self._folders.of(row.id).path, row.attempt, metadata, code)
            logger.info("job_submitted job_id=%s submission_id=%s", row.id, submission)
        except (LauncherError, PackageGone) as error:
            refusal = str(error)
            # It is tried again in each turn: the log has the same words once.
            level = logging.DEBUG if row.reason == _waits_for_launcher(refusal) else logging.WARNING
            logger.log(level, "submit_failed job_id=%s submission_id=%s error=%s", row.id, submission, error)
        return Asked(row, Submit(), unknown, refusal)

    def _code(self, row: JobRow) -> Code | None:
        """The script that the job runs; None for a recipe of ours. Raises: PackageGone, LauncherError."""
        if row.spec.get("recipe", {}).get("name") != "script":
            return None
        recipe = ScriptRecipe.model_validate(row.spec["recipe"])
        try:
            package = None if recipe.package is None else self._packages.whole(recipe.package)
        except OSError as error:
            raise LauncherError(f"the package {recipe.package} cannot be read: {error.strerror}") from error
        return Code(package, recipe.package, recipe.working_dir, recipe.pip, recipe.env_vars)

    def _question(self, row: JobRow) -> Asked:
        """Ask what has become of the job, and end its run where that is due. In a thread of its own as well."""
        status = self._launcher.status(submission_id(row.id, row.attempt))
        action = decide(self._view(row, status), status)
        if isinstance(action, StopRun):
            self._confirm_owner()
            try:
                self._launcher.cancel(submission_id(row.id, row.attempt))
            except LauncherError as error:
                self._warn("cancel_failed", row, error)
        elif not self._launcher.own_cluster and status.state in _OVER:
            self._keep_rest_of_log(row)
        elif status.state in _LIVE:
            self._make_room(row)
        return Asked(row, action, status)

    def _make_room(self, row: JobRow) -> None:
        """Let the cluster have as many pods as the job may have workers now."""
        wanted = wanted_workers(row)
        try:
            self._launcher.resize(submission_id(row.id, row.attempt), wanted.min, wanted.max)
        except LauncherError as error:
            self._warn("resize_failed", row, error)

    def _warn(self, what: str, row: JobRow, error: LauncherError) -> None:
        """Log it; the same words again, in the next turns, for those alone who ask for everything."""
        said = str(error)
        level = logging.DEBUG if self._warned.get((what, row.id)) == said else logging.WARNING
        self._warned[what, row.id] = said
        logger.log(level, "%s job_id=%s error=%s", what, row.id, said)

    def _keep_rest_of_log(self, row: JobRow) -> None:
        """What a driver has not sent any more of its log its cluster may still have."""
        folder = self._folders.of(row.id)
        try:
            size = folder.log_size(row.attempt)
            rest = self._launcher.logs(submission_id(row.id, row.attempt), size, LONGEST_LOG_BYTES)
            room = self._log_room(row.id)
            with self._folders.lock:
                _, added = folder.append_log(row.attempt, size, rest.text.encode(), room)
            if added:
                with self._db.write() as session:
                    JobRepository(session).keep_more(row.id, added)
        except (LauncherError, OSError) as error:
            logger.warning("rest_of_log_lost job_id=%s reason=%s", row.id, error)

    def _view(self, row: JobRow, status: LaunchStatus) -> JobView:
        """The row with what the run has left: what it posted, else what is in its folder."""
        summary, failure = row.summary, Failure.model_validate(row.failure) if row.failure else None
        if status.state not in (LaunchState.UNKNOWN, LaunchState.PENDING, LaunchState.RUNNING):
            folder = self._folders.of(row.id)
            summary = summary if summary is not None else folder.read_summary()
            failure = failure if failure is not None else folder.read_failure()
        return JobView(
            id=row.id,
            state=JobState(row.state),
            attempt=row.attempt,
            max_attempts=row.max_attempts,
            max_restarts=int(row.spec["workers"]["max_restarts"]),
            absent_polls=self._absent.get(row.id, 0),
            recalled=recalled(row),
            summary=summary,
            failure=failure,
        )

    # the run folder

    def _keep_wanted(self, row: JobRow) -> bool:
        """Write workers.json where a request could not, or where the file is older than the job's row.

        False where the row cannot be understood, which is logged.
        """
        folder = self._folders.of(row.id)
        try:
            if folder.read_wanted() != limits_now(row) and folder.path.is_dir():
                write_wanted(self._db, self._folders, row.id)
        except OSError:
            logger.exception("wanted_workers_not_written job_id=%s", row.id)
        except (OperationalError, NotOwner):
            raise
        except Exception:
            logger.exception("reconcile_failed job_id=%s", row.id)
            return False
        return True

    def _ready_folder(self, row: JobRow) -> bool:
        """Complete the run folder where a request could not. Where the disk refuses, the job waits."""
        try:
            if not self._folders.of(row.id).complete(row.token_hash):
                with self._folders.lock:
                    self._complete_folder(row)
            # A job whose limits cannot be written would start as it was.
            return self._folders.of(row.id).read_wanted() == limits_now(row)
        except OSError:
            logger.exception("run_folder_incomplete job_id=%s", row.id)
            return False

    def _complete_folder(self, row: JobRow) -> None:
        """Only the hash of its token is known: mint another."""
        with self._db.read() as session:
            now = JobRepository(session).get(row.id)
        folder = self._folders.of(row.id)
        if now is None or folder.complete(now.token_hash):
            return
        token = new_token()
        with self._db.write() as session:
            JobRepository(session).note([row.id], token_hash=token_hash(token))
        folder.write(job_json(row, self._folders.told_to(row.id)), limits_now(now), token, self._folders.service)
        logger.info("run_folder_completed job_id=%s", row.id)

    def _draw_ticket(self, row: JobRow) -> None:
        """Have the service know the ticket of this attempt; once, however often it is submitted."""
        token = self._folders.of(row.id).read_token()
        ticket = token_hash(ticket_of(token, row.attempt))
        with self._db.write() as session:
            jobs = JobRepository(session)
            now = jobs.get(row.id)
            if now is not None and now.ticket_hash != ticket:
                jobs.note([row.id], ticket_hash=ticket, claimant_hash=None)

    # applying

    def _heard(self, answer: Answer[Asked]) -> Asked | None:
        """What a call found, noted; None where it failed, which is logged."""
        if answer.seconds >= self.patience_s:
            self._slow.add(answer.key)
        else:
            self._slow.discard(answer.key)
        asked = answer.result
        if asked is None:
            error = answer.error
            if isinstance(error, NotOwner):
                raise error
            logger.error("reconcile_failed job_id=%s", answer.key, exc_info=error)
        elif asked.status.state is LaunchState.ABSENT:
            self._absent[answer.key] = self._absent.get(answer.key, 0) + 1
        else:
            self._absent.pop(answer.key, None)
        return asked

    def _move_all(self, asked: Sequence[Asked]) -> None:
        """Apply many in one transaction; where one of them cannot be applied, each by itself."""
        try:
            with self._db.write() as session:
                rows = JobRepository(session).lock_all([one.row.id for one in asked])
                found = [(current, one) for one in asked if (current := self._unmoved(rows, one)) is not None]
                transition_all(
                    session, [(current, *_target(current, one.action)) for current, one in found], self._clock()
                )
        except (NotOwner, OperationalError):
            raise
        except Exception as error:
            if len(asked) > 1:
                for one in asked:
                    self._move_all([one])
            elif isinstance(error, StaleDataError):
                logger.debug("job_moved job_id=%s", asked[0].row.id)
            else:
                logger.exception("reconcile_failed job_id=%s", asked[0].row.id)
            return
        for current, one in found:
            if isinstance(one.action, Retry):
                self._absent.pop(current.id, None)
            said = (current.id, one.row.state, current.state, current.attempt)
            logger.info("job_moved job_id=%s from=%s to=%s attempt=%d", *said)

    @staticmethod
    def _unmoved(rows: dict[str, JobRow], asked: Asked) -> JobRow | None:
        """The row as it is now; None where it has changed since it was read: the next turn sees it as it is now."""
        current = rows.get(asked.row.id)
        if current is not None and current.version == asked.row.version:
            return current
        logger.debug("job_moved job_id=%s", asked.row.id)
        return None

    def _explain_open(self, new: Iterable[JobRow]) -> None:
        """Say of jobs whose submit has not been answered, or finds no room, what they wait for."""
        ages = {row: self._submits.age(row.id) for row in new}
        why = {
            row: "it has not answered yet" for row, age in ages.items() if age is not None and age > EXPLAINED_AFTER_S
        }
        if why:
            busy = f"it has {MOST_SUBMITS} submissions to answer before"
            left = {row for row, age in ages.items() if age is None and self._asked_in.get(row.id) != self._turns}
            why |= dict.fromkeys(left, busy)
        self._explain(why)

    def _explain(self, why: dict[JobRow, str]) -> None:
        """Write the reasons why jobs wait to be submitted, where they are others than before."""
        by_reason: dict[str, list[str]] = {}
        for row, words in why.items():
            reason = _waits_for_launcher(words)
            if row.reason != reason:
                by_reason.setdefault(reason, []).append(row.id)
        if by_reason:
            with self._db.write() as session:
                for reason, ids in by_reason.items():
                    JobRepository(session).note(ids, [JobState.SUBMITTING, JobState.QUEUED], reason=reason)

    def _write_waits(self, found: Iterable[Asked]) -> None:
        """Write what pods wait for, in the reason of jobs that are not running, and in the events of all."""
        now = self._clock()
        news: list[tuple[JobRow, str]] = []
        for asked in found:
            job, words = asked.row.id, storable(asked.status.waits_for)
            last = self._waits.get(job, NOTHING_WRITTEN)
            # The scheduler counts nodes in its words: they may be others every second.
            if (
                asked.status.state in _LIVE
                and words != last.words
                and (not last.words or not 0.0 <= now - last.at < WRITTEN_AGAIN_S)  # a clock may go back
            ):
                self._waits[job] = Written(words, now)
                news.append((asked.row, words))
        if not news:
            return
        with self._db.write() as session:
            jobs = JobRepository(session)
            jobs.lock_all([row.id for row, _ in news])  # before any event has its number
            for row, words in news:
                reason = f"waiting for the cluster: {words}" if words else None
                jobs.note([row.id], [JobState.PENDING, JobState.CANCELLING], reason=reason)
                if words:
                    event = {"kind": EventKind.CLUSTER_WAITS.value, "step": last_step(row), "time": now}
                    jobs.put_events(row.id, row.attempt, [{**event, "fields": {"reason": words}}])

    def _drop_expired_leases(self) -> None:
        now = self._clock()
        self._leases_ahead_s += max(0.0, self._leases_at - now)
        self._leases_at = now
        if self._leases_ahead_s:  # the clock was set back: they are to end as soon as they would have
            with self._db.write() as session:
                session.execute(update(LeaseRow).values(expires_at=LeaseRow.expires_at - self._leases_ahead_s))
            self._leases_ahead_s = 0.0  # once it is committed: what fails is done in a later turn
        with self._db.read() as session:
            expired = JobRepository(session).has_expired_leases(now)
        if expired:
            with self._db.write() as session:
                JobRepository(session).drop_expired_leases(now)


def _waits_for_launcher(words: str) -> str:
    """The reason of a job that the launcher has not taken yet."""
    return storable(f"waiting for the launcher: {words}")


def _moves(action: Action) -> bool:
    return not isinstance(action, Wait | StopRun)


def _target(row: JobRow, action: Action) -> tuple[JobState, str | None]:
    """The state that the action leads to, and the reason. row: modified, all but these two."""
    match action:
        case Submit():
            return JobState.PENDING, None
        case Run():
            return JobState.RUNNING, None
        case Retry(reason, counted):
            row.attempt += 1
            row.max_attempts += not counted
            row.failure = None
            if recalled(row):
                row.granted = row.queue = None
            return JobState.SUBMITTING, reason
        case Succeed(summary):
            if summary is not None:
                row.summary = summary
            return JobState.SUCCEEDED, None
        case Fail(reason):
            return JobState.FAILED, reason
        case Cancel():
            return JobState.CANCELLED, None
        case Wait() | StopRun():
            raise AssertionError(f"{action} moves no job")
