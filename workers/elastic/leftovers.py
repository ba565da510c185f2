"""The actors and placement groups of a job, found by name in the whole cluster, and their removal.

By name, because their maker may be dead: workers and their placement groups are detached, so Ray frees neither.
Ray looks names of placement groups up in the caller's namespace only; the table of all of them has no such border.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from thinwire.workers.elastic.plan import Plan

logger = logging.getLogger(__name__)


def workers_of(plan: Plan) -> dict[int, Any]:
    """The handles of all living workers of the job, by slot."""
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        slot = plan.slot_of(entry["name"])
        if entry["namespace"] == plan.namespace and slot is not None:
            handle = actor(plan, entry["name"])
            if handle is not None:
                found[slot] = handle
    return found


def units_of(plan: Plan) -> dict[str, Any]:
    """All placement groups of the job that are not removed, by name."""
    from ray._raylet import PlacementGroupID

    return {
        entry["name"]: PlacementGroup(PlacementGroupID(bytes.fromhex(entry["placement_group_id"])))
        for entry in placement_group_table().values()
        if plan.is_unit(entry["name"]) and entry["state"] != "REMOVED"
    }


def placed(unit: Any) -> bool:
    """Whether this placement group has its resources. (`wait(0)` says no too often.)"""
    return bool(placement_group_table(unit).get("state") == "CREATED")


def node_of(unit: Any) -> str | None:
    """The id of the node where this placement group has its resources; None where it has none."""
    nodes = placement_group_table(unit).get("bundles_to_node_id") or {}
    return next((node for node in nodes.values() if node), None)


def actor(plan: Plan, name: str) -> Any | None:
    """The handle of a living actor of the job; None where there is none."""
    try:
        return ray.get_actor(name, namespace=plan.namespace)
    except ValueError:
        return None


def kill(handle: Any) -> None:
    """End an actor for good. One that is dead already stays so."""
    try:
        ray.kill(handle, no_restart=True)
    except (RayError, ValueError) as error:
        logger.info("actor_not_killed reason=%s", error)


def remove_units(plan: Plan, *, keep: Collection[str] = ()) -> list[str]:
    """Free all placement groups of the job but those named in `keep`. Returns their names."""
    removed = []
    for name, unit in units_of(plan).items():
        if name not in keep:
            remove_placement_group(unit)
            removed.append(name)
    return removed


def remove_workers(plan: Plan) -> list[int]:
    """Kill all workers of the job. Returns their slots."""
    living = workers_of(plan)
    for handle in living.values():
        kill(handle)
    return sorted(living)


def remove_all(plan: Plan) -> None:
    """Kill controller and workers, free all placement groups. The membership actor is left."""
    controller = actor(plan, plan.controller)
    if controller is not None:
        kill(controller)
    slots, units = remove_workers(plan), remove_units(plan)
    logger.info("job_removed job=%s slots=%s units=%d", plan.job, slots, len(units))
