"""Two real jobs of which only one fits: the second holds nothing of the cluster until all of its workers fit."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, wait_for
from thinwire.service.launch.ray_jobs import RayJobs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def units(server: Server, job_id: str) -> list[str]:
    """The states of the placement groups of the job's workers, as Ray has them, those that are gone left out."""
    token = (server.home / "ray" / "auth_token").read_text().strip()
    url = f"http://{server.ray()}/api/v0/placement_groups?limit=1000"
    found = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=30.0).json()["data"]["result"][
        "result"
    ]
    return [one["state"] for one in found if one["name"].startswith(f"{job_id}/") and one["state"] != "REMOVED"]


@pytest.mark.slow
def test_of_two_jobs_of_which_one_fits_the_second_holds_nothing_till_all_of_it_fits(server: Server) -> None:
    """Of 8 places one takes 5: of the other's 4 Ray would give 3."""
    places = max(os.cpu_count() or 1, 8)
    most, few = places - 3, 4
    small: dict[str, Any] = {"global_batch": places, "steps": 20000, "name": "queue"}
    first = server.submit(**small, workers={"min": most, "max": most})
    wait_for("the first has its places", lambda: units(server, first) == ["CREATED"] * most)
    token = (server.home / "ray" / "auth_token").read_text().strip()
    ray = f"http://{server.ray()}"
    wait_for("another service sees it", lambda: RayJobs(ray, token).room("other.").others_cpus == most)
    assert RayJobs(ray, token).room(f"{first}/").others_cpus == 0
    with pytest.raises(AssertionError, match=f"workers.min: must be at most {places}: .*the cluster has {places}"):
        server.submit(**{**small, "global_batch": 4000}, workers={"min": 4000, "max": 4000})
    second = server.submit(**small, workers={"min": few, "max": few})
    quick = {"steps": 4, "optimizer": {"name": "adam"}}
    third = server.submit(**small | quick, workers={"min": 1, "max": 1})
    queue = wait_for("the second waits", lambda: server.job(second)["queue"])
    assert (queue["position"], queue["needs"], queue["total"]) == (1, few, places)
    assert queue["holders"][0] == {"job": first, "workers": most, "min": most}
    wait_for("the first trains", lambda: server.job(first)["world_size"] == most)
    assert server.wait_for_end(third)["state"] == "SUCCEEDED"  # it fits beside them
    wait_for("its place is free again", lambda: server.job(second)["queue"]["free"] == 3)
    assert (server.job(second)["state"], units(server, second)) == ("QUEUED", [])
    server.call("POST", f"/v1/jobs/{first}/cancel")
    wait_for("the second has its places", lambda: units(server, second) == ["CREATED"] * few)
    assert server.job(first)["state"] == "CANCELLED"
    wait_for("the second trains", lambda: server.job(second)["world_size"] == few)
    server.call("POST", f"/v1/jobs/{second}/cancel")
    assert server.wait_for_end(second)["state"] == "CANCELLED"
