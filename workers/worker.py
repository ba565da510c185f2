"""What each Ray Train worker runs: joins the other workers of the job, trains, and says how it ended.

Who the others are says the membership of the job; with `workers.elastic: restart` it is the process group that Ray
Train made.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import ValidationError

from thinwire.contract import logs
from thinwire.contract.figures import loss_is
from thinwire.contract.reports import Failure
from thinwire.contract.spec import JobSpec, ScriptSpec, read_accepted
from thinwire.contract.traces import OfJob
from thinwire.workers.elastic.worker_side import Failed, adopted_by
from thinwire.workers.error_words import as_failure, let_stderr_take_any_text, words_of
from thinwire.workers.nodes import own_address, use_interface_of
from thinwire.workers.run_place import Credentials, Place

if TYPE_CHECKING:
    import torch

    from thinwire.workers.companions import Companions
    from thinwire.workers.forming.box import BoxRanks
    from thinwire.workers.forming.group import ElasticRanks
    from thinwire.workers.membership.member import Member
    from thinwire.workers.ranks import Ranks
    from thinwire.workers.session.training import Run

logger = logging.getLogger(__name__)

ADOPT_S = 60.0
"""How long workers train without a driver: that of the next attempt takes up to 20 s to start, and adopts them."""
ALONE_S = 300.0
"""How long they wait where the membership is away too, or a later attempt is there and has not adopted them: they
commit nothing then, and one of them may be the last that holds the state."""


def train_worker(config: dict[str, Any], credentials: Credentials | None = None) -> Failed | None:
    """Ray Train's train function. config: run_dir, attempt; "elastic" where the ranks are a membership's.

    credentials: where workers share no folder; run_dir is then the driver's, and this one makes a folder of its own.

    Returns the error of its own that this worker cannot go on with, where the others can: workers/elastic then fills
    its slot again, or ends the job. Where all ranks start again together such an error ends the job: it is written to
    failure.json, posted, and ends this function normally, so that Ray does not start the group again; peers that wait
    for it see the file, and end too. PeerLost is raised: the group starts again and goes on from the checkpoint. So is
    what a membership says to a worker that has no place in it any more: to return None would mean that training is at
    its end, and nobody would be replaced.
    """
    import ray.train.torch

    from thinwire.comm import PeerLost
    from thinwire.workers.companions import ENDS_S
    from thinwire.workers.membership.state import Dismissed, MembershipError
    from thinwire.workers.owed import BROKEN_S, LEAVE_S
    from thinwire.workers.ranks import RunEnded
    from thinwire.workers.session.job import failure_of_script, run_job
    from thinwire.workers.session.training import Run
    from thinwire.workers.telemetry.history import write_report
    from thinwire.workers.telemetry.reporter import Reporter, RunSuperseded
    from thinwire.workers.telemetry.trackers.of_job import FirstStep, trackers_of
    from thinwire.workers.whereabouts import Stillness, StillnessWatch

    let_stderr_take_any_text()
    began = time.time()
    run_dir, own_attempt = Path(config["run_dir"]), int(config["attempt"])  # the driver's

    def attempt() -> int:
        return max(own_attempt, adopted_by())

    logs.set_up(fields={"attempt": attempt}, force=True)
    place = Place(run_dir, attempt) if credentials is None else Place.of_its_own(credentials, attempt)
    if place.has_failed():  # a peer has failed for good while this rank saw only that it was gone
        return None
    place.begin()
    job = json.loads(place.folder.job.read_text())
    of_process: dict[str, logs.Field] = {"job_id": job["job_id"], "attempt": attempt, "pid": os.getpid()}
    logs.set_up(fields=of_process)
    spec = read_accepted(job["spec"])
    run = Run(place.run_dir, job["created_at"], own_attempt, adopted_by, shared=place.is_shared)
    address = own_address(spec.network.interface)
    use_interface_of(address)
    device = ray.train.torch.get_device()
    ranks, number, companions = _ranks(config, spec, address, device, place, run)
    of_process["rank"] = number
    adopt_s = ALONE_S if ranks.elastic else 0.0
    trace = OfJob(job, attempt(), "worker")
    spans = FirstStep(trace, began) if trace.is_on else None
    trackers = trackers_of(spec, job, place.folder, shared=place.is_shared, spans=spans)
    reporter = Reporter.in_place(place, number, adopt_s=adopt_s, trackers=trackers)
    reporter.serve(job["job_id"], number, address)
    logger.info("worker_started number=%d pid=%d", number, os.getpid())
    still = None if ranks.elastic else StillnessWatch(reporter, number, Stillness(ranks.where), lambda: ranks.step)
    patience_s = 0.0  # with the other processes of a box
    try:
        summary = run_job(spec, run, ranks, device, reporter)
        patience_s = ENDS_S
        if summary is not None:
            write_report(place.run_dir, summary, loss_is(spec))
        reporter.close(summary=summary)
    except RunEnded as reason:
        logger.info("run_ended number=%d reason=%r", number, str(reason))
        reporter.close(timeout_s=2.0)
    except (PeerLost, MembershipError) as reason:
        patience_s = LEAVE_S + BROKEN_S if isinstance(reason, Dismissed) else 0.0  # they have checkpoints to write
        reporter.close(timeout_s=2.0)  # a restart must not wait for a service that is away too
        raise
    except RunSuperseded as error:
        reporter.close(timeout_s=2.0)
        if not ranks.elastic:
            raise
        return Failed(type(error).__name__, str(error), ranks.step, of_all=True)  # the next rank 0 is refused too
    except Exception as error:
        logger.exception("training_failed number=%d step=%d", number, ranks.step)
        if companions is not None and companions.failure is not None:  # of which this error is a consequence
            failure = companions.failure
        elif isinstance(spec, ScriptSpec):
            failure = failure_of_script(error, spec.recipe, ranks.step)
        else:
            failure = failure_of(error, ranks.step)
        if ranks.elastic:  # which has reported it to the others
            reporter.close(timeout_s=2.0)
            return _failed(failure, ranks, error)
        place.fail(failure)
        ranks.fail(failure.message)
        reporter.close(failure=failure)
    finally:
        if still is not None:
            still.close()
        if companions is not None:
            companions.stop(patience_s)
    return None


def _ranks(
    config: dict[str, Any], spec: JobSpec, address: str, device: torch.device, place: Place, run: Run
) -> tuple[Ranks, int, Companions | None]:
    """With whom this worker trains, and what it is called: its slot where workers are replaced, else its rank.

    The third: the other processes of this worker, where it is a box.
    """
    from thinwire.comm import TorchGroup
    from thinwire.workers.elastic.worker_side import renew_lease, resolve, slot_of, told_to_leave
    from thinwire.workers.forming.group import ElasticRanks
    from thinwire.workers.forming.pairs import Door
    from thinwire.workers.membership.member import Member
    from thinwire.workers.membership.seats import Identity
    from thinwire.workers.ranks import FixedRanks
    from thinwire.workers.saving import floor_of

    if "elastic" not in config:
        group = TorchGroup()
        return FixedRanks(group), group.rank, None
    slot = slot_of(config)
    door = Door(address, config["elastic"]["secret"])
    identity = Identity(uuid4().hex, slot, address, os.getpid(), socket.gethostname(), door.port)
    member = Member(lambda: resolve(config), config["elastic"]["secret"], identity, on_heard=renew_lease)
    threading.Thread(target=pass_on, args=(told_to_leave, member), name="thinwire-notice", daemon=True).start()
    floor = partial(floor_of, place.run_dir, spec.checkpoint)
    size = spec.workers.per_box
    ranks = ElasticRanks(member, door, device, ended=place.has_failed, floor=floor, beside=size > 1)
    if size == 1:
        return ranks, slot, None
    of_box, companions = box_of(ranks, member, size, devices_of(device, size), address, run)
    return of_box, slot, companions


def devices_of(first: torch.device, size: int) -> list[torch.device]:
    """Of the processes of a box, that of the first given: Ray shows a worker its GPUs, from 0 on."""
    import torch

    return [first if first.index is None else torch.device(first.type, first.index + rank) for rank in range(size)]


def box_of(
    ranks: ElasticRanks, member: Member, size: int, devices: list[torch.device], address: str, run: Run
) -> tuple[BoxRanks, Companions]:
    """The ranks of the first process of a box, and the other ones, which are started. Raises: BoxBroken."""
    from thinwire.workers.companions import Companions
    from thinwire.workers.forming.box import BoxRanks

    companions = Companions(member.fail)
    processes = companions.start(size, devices, address, run, ranks.timeout_s)
    first = ranks, member
    return BoxRanks(processes, first, address, devices[0], ranks.timeout_s, settle=companions.settle), companions


def _failed(failure: Failure, ranks: Ranks, error: Exception) -> Failed:
    from thinwire.workers.session.course import OfRanks

    seat = ranks.seat
    if seat is None:
        return Failed(failure.kind, failure.message, ranks.step)
    # Without ranks it is the mean over all that is not finite.
    of_all = isinstance(error, OfRanks) and len(error.ranks) in (0, seat.size)
    return Failed(failure.kind, failure.message, ranks.step, seat.generation, of_all)


def pass_on(told_to_leave: threading.Event, member: Member) -> None:
    """Wait for a notice, and pass it to the membership."""
    told_to_leave.wait()
    member.ask_to_leave("its process got SIGTERM")


def failure_of(error: BaseException, step: int | None = None) -> Failure:
    """An error in words for the owner of the job. step: the last that was committed, where one was."""
    if isinstance(error, ValidationError):
        text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
    else:
        text = words_of(error) or type(error).__name__
    return as_failure(error, text, step)
