"""`thinwire plan`: alone, with a link that is given; or as ranks on their own machines, which measure it first."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm.bucket_size import measure
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.wire.step_time import Transport
from thinwire.contract.plan import Link, Plan, PlanFailed, PlanRequest, Say
from thinwire.contract.spec import ScriptSpec
from thinwire.workers.data.corpus import DataError
from thinwire.workers.plan.asked import job_of_recipe
from thinwire.workers.plan.forecast import forecast
from thinwire.workers.plan.rehearsal import Orders, devices_for, run_rank, spawn
from thinwire.workers.plan.scripts import Learned, OfShapes, dry_steps
from thinwire.workers.plan.ways import PlannedJob, chosen_bucket, compressed_for, network_of
from thinwire.workers.recipe import Recipe
from thinwire.workers.recipes import recipe_of

DRY_STEPS = "dry steps of the script"
HERE = Link(0.0, float("inf"), "one worker: no link")


def run(request: PlanRequest, say: Say) -> Plan | None:
    """Rehearse and predict. None on all ranks but 0. Raises: PlanFailed."""
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return _as_ranks(request, say)
        return _alone(request, say)
    except (DataError, ValueError) as error:
        raise PlanFailed(str(error)) from error


def _alone(request: PlanRequest, say: Say) -> Plan:
    workers = request.workers or request.spec.workers.max
    link = HERE if workers == 1 else request.link
    if link is None:
        raise PlanFailed(
            "there is no link to measure from this machine alone: give --rate (and --latency), --doctor or "
            "--collectives, or start the command on each machine as torchrun starts a script: torchrun --nnodes 2 "
            "--rdzv-endpoint HEAD:29500 --no-python thinwire plan FILE"
        )
    network_of(link, workers, request.per_machine)  # before anything is started
    learned = None
    if isinstance(request.spec, ScriptSpec):
        say(DRY_STEPS, 0.0)
        devices = devices_for(request.spec.workers.device, request.per_machine)
        learned = dry_steps(request.spec, workers, request.per_machine, request.steps, devices)
    job, orders = orders_of(request, link, workers, learned)
    found = spawn(orders, say)
    if link.rows is not None:
        found = replace(found, transport=Transport())
    say("done", 1.0)
    return forecast(job, link, workers, request.per_machine, found, learned.assumed() if learned else ())


def orders_of(
    request: PlanRequest, link: Link, workers: int, learned: Learned | None = None
) -> tuple[PlannedJob, Orders]:
    """What is planned, and the orders of the processes that rehearse. learned: of a script.

    Raises: ValueError where machines are not full, more workers than samples.
    """
    spec = request.spec
    recipe: Recipe
    if isinstance(spec, ScriptSpec):
        assert learned is not None
        job, recipe = learned.as_job(spec), OfShapes(learned.shapes, learned.global_batch)
    else:
        job, recipe = job_of_recipe(spec), recipe_of(spec)
    if workers > job.global_batch:
        raise ValueError(f"{workers} workers for global_batch = {job.global_batch}: at least one sample a worker")
    with torch.device("meta"):
        elements = sum(param.numel() for param in recipe.model().parameters())
    bucket = chosen_bucket(job, network_of(link, workers, request.per_machine), elements, on_gpu=False)
    return job, Orders(
        workers,
        request.per_machine,
        bucket,
        request.steps,
        job.device,
        job.overlap,
        spec.model_dump(mode="json") if learned is None else None,
        None if learned is None else asdict(learned),
        compressed_for(job.run.family),
        {job.run.method: job.run.own},
    )


def _as_ranks(request: PlanRequest, say: Say) -> Plan | None:
    """Each rank rehearses on its machine, all at once; the link is measured between them unless it is given."""
    torch.set_num_threads(1)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    try:
        group = TorchGroup()
        workers = request.workers or group.size
        link = request.link
        if link is None:
            if group.rank == 0:
                say("measuring the link", 0.0)
            network = measure(group)
            link = Link(network.latency_s, network.bytes_per_s, f"measured between {group.size} ranks")
        network_of(link, workers, request.per_machine)
        machines = _machines(group)
        here = sum(machine == _machine() for machine in machines)
        learned = None
        if isinstance(request.spec, ScriptSpec):
            if group.rank == 0:
                say(DRY_STEPS, 0.0)
            beside = sum(machine == _machine() for machine in machines[: group.rank])
            device = devices_for(request.spec.workers.device, here)[beside]
            learned = dry_steps(request.spec, workers, 1, request.steps, [device], dist.barrier)
        job, orders = orders_of(request, link, workers, learned)
        # All rehearse, each beside those of its own machine; the bandwidth was measured through the transport.
        done = count(1)
        sharing, parts = max(here, request.per_machine), 2 + len(orders.methods)
        found = run_rank(orders, group, group.size, sharing, lambda doing: say(doing, next(done) / parts))
        if found is None:
            return None
        say("done", 1.0)
        return forecast(job, link, workers, request.per_machine, found, learned.assumed() if learned else ())
    finally:
        if own:
            dist.destroy_process_group()


def _machine() -> str:
    """This machine, whatever networks it has: hosts of a lab share its cores."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _machines(group: TorchGroup) -> list[str]:
    """Of each rank. Collective."""
    machines = [""] * group.size
    dist.all_gather_object(machines, _machine())
    return machines
