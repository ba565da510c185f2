"""Lists that grow: pages that miss nothing and repeat nothing, filters, labels."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, spec
from thinwire.contract.jobs import JobState
from thinwire.service.cursors import cursor
from thinwire.service.jobs.listing import LabelRow
from thinwire.service.launch.protocol import LaunchState


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Jobs of two people, with names, labels and states of their own, a second apart."""
    service = Service(tmp_path_factory.mktemp("several") / "home")
    anna = service.person("anna")
    run: Any = spec
    bodies = [
        (None, run(name="gpt-small", labels={"team": "vision", "stage": "dev"})),
        (anna, run(name="gpt-large", labels={"team": "vision", "example.com/cost": "42"})),
        (anna, run(name="bert", labels={"team": "text"})),
        (None, run(name="bert")),
    ]
    for headers, body in bodies:
        service.client.post("/v1/jobs", json=body, headers=headers).raise_for_status()
        service.clock.pass_(1.0)
    yield service
    service.close()


def names(service: Service, **query: Any) -> list[str]:
    """Of the jobs that are found, the oldest first."""
    answer = service.client.get("/v1/jobs", params=query)
    assert answer.status_code == 200, answer.text
    return [job["name"] for job in answer.json()["jobs"]][::-1]


def iso(service: Service, seconds_ago: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(service.clock.now - seconds_ago, UTC).isoformat()


def test_a_list_is_filtered_by_all_that_is_asked(several: Service) -> None:
    assert names(several) == ["gpt-small", "gpt-large", "bert", "bert"]
    assert names(several, name="bert") == ["bert", "bert"]
    assert names(several, name="gpt-*") == ["gpt-small", "gpt-large"]
    assert names(several, name="gpt-") == []
    assert names(several, name="*") == names(several)
    assert names(several, person="anna") == ["gpt-large", "bert"]
    assert names(several, label="team=vision") == ["gpt-small", "gpt-large"]
    assert names(several, label=["team=vision", "stage=dev"]) == ["gpt-small"]
    assert names(several, label="example.com/cost=42") == ["gpt-large"]
    assert names(several, label="team=vision", person="anna", name="gpt*") == ["gpt-large"]
    assert names(several, label="team=") == []
    assert names(several, text="GPT") == ["gpt-small", "gpt-large"]
    assert names(several, text="anna") == ["gpt-large", "bert"]
    assert names(several, text="team=text") == ["bert"]
    assert names(several, text="%") == names(several, text="_") == []
    assert names(several, state=["SUBMITTING", "RUNNING"]) == names(several)
    assert names(several, state=["SUCCEEDED", "FAILED"]) == []
    assert names(several, created_after=iso(several, 3.0), created_before=iso(several, 1.0)) == ["gpt-large", "bert"]


@parametrize(
    "query",
    [
        {"label": "team"},
        {"label": "=vision"},
        {"label": ["team=a", "team=b"]},
        {"state": "GONE"},
        {"name": ""},
        {"person": ""},
        {"text": "x" * 201},
        {"created_after": "yesterday"},
        {"created_after": "2026-01-01T00:00:00"},
        {"before": "x" * 513},
        {"before": "%F0%9F%90%9B"},
    ],
    usual=[0, 2, -3],
)
def test_a_filter_that_cannot_be_is_refused_by_its_name(several: Service, query: dict[str, Any]) -> None:
    answer = several.client.get("/v1/jobs", params=query)
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"].split(".")[0] in query


def _encoded(found: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(found).encode()).decode().rstrip("=")


@given(
    made_up=st.one_of(
        st.text(max_size=100),
        st.binary(max_size=100).map(lambda found: base64.urlsafe_b64encode(found).decode()),
        st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=4).map(_encoded),
        st.lists(st.text() | st.integers() | st.floats(), max_size=4).map(lambda key: _encoded(["jobs", *key])),
        st.just(_encoded(["jobs", 10**400, "a"])),
        st.just(_encoded(["jobs", 1.0, "\ud800"])),
        st.just(_encoded(["jobs", 1.0, "\0"])),
        st.just(cursor("tokens", "anna", 1)),
    )
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_cursor_that_somebody_has_made_up_is_a_place_or_refused_in_words(several: Service, made_up: str) -> None:
    for path, parameter in (("/v1/jobs", "before"), ("/v1/tokens", "after"), ("/v1/packages", "after")):
        answer = several.client.get(path, params={parameter: made_up})
        assert answer.status_code in (200, 422), answer.text
        if answer.status_code == 422:
            assert answer.json()["problems"][0]["path"] == parameter


def test_the_id_of_a_job_is_a_place_as_it_was_before_there_were_cursors(several: Service) -> None:
    page = several.client.get("/v1/jobs", params={"limit": 2}).json()
    old = several.client.get("/v1/jobs", params={"before": page["jobs"][-1]["id"]}).json()
    assert old["jobs"] == several.client.get("/v1/jobs", params={"before": page["next"]}).json()["jobs"]
    assert [job["name"] for job in old["jobs"]] == ["gpt-large", "gpt-small"]


class Walks:
    """A service whose jobs are made and deleted between the pages of a walk."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def submit(self, **labels: str) -> str:
        return self.service.submit(labels=labels)

    def delete(self, job_id: str) -> None:
        self.service.client.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
        self.service.turn(2)
        self.service.client.delete(f"/v1/jobs/{job_id}").raise_for_status()


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    service = Service(tmp_path_factory.mktemp("walked") / "home", changes_burst=100_000)
    yield Walks(service)
    service.close()


ACTIONS = st.lists(st.sampled_from(["submit", "later", "delete", "delete the last one shown"]), max_size=3)


WALK = {
    "moments": st.lists(st.booleans(), min_size=1, max_size=7),
    "limit": st.integers(1, 3),
    "by_label": st.booleans(),
    "actions": st.lists(ACTIONS, min_size=8, max_size=8),
    "data": st.data(),
}
QUIET: Any = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(**WALK)
@settings(max_examples=5, **QUIET)
def test_a_walk_sees_each_job_that_stood_all_the_time_exactly_once(walked: Walks, **walk: Any) -> None:
    _walk(walked, **walk)


@pytest.mark.slow
@given(**WALK)
@settings(max_examples=100, **QUIET)
def test_100_walks_see_each_job_that_stood_all_the_time_exactly_once(walked: Walks, **walk: Any) -> None:
    _walk(walked, **walk)


def _walk(
    walked: Walks, moments: list[bool], limit: int, by_label: bool, actions: list[list[str]], data: st.DataObject
) -> None:
    service = walked.service
    standing = []
    for later in moments:
        service.clock.pass_(1.0 if later else 0.0)
        standing.append(walked.submit(walk="yes"))
    stood, seen, before = set(standing), [], None
    query: dict[str, Any] = {"limit": limit, **({"label": "walk=yes"} if by_label else {})}
    for step in range(100):
        page = service.client.get("/v1/jobs", params=query | ({"before": before} if before else {})).json()
        seen += [job["id"] for job in page["jobs"]]
        before = page["next"]
        if before is None:
            break
        for action in actions[step] if step < len(actions) else []:
            if action == "submit":
                standing.append(walked.submit(walk="yes"))
            elif action == "later":
                service.clock.pass_(1.0)
            elif standing:
                gone = seen[-1] if action != "delete" else data.draw(st.sampled_from(standing))
                if gone in standing:
                    walked.delete(gone)
                    standing.remove(gone)
                    stood.discard(gone)
    assert before is None
    assert len(seen) == len(set(seen))
    assert stood <= set(seen)
    for job_id in standing:
        walked.delete(job_id)


def test_tokens_are_listed_in_pages_by_name(service: Service) -> None:
    for name in ("b", "a", "c", "d"):
        service.person(name)
    service.client.delete("/v1/tokens/b")
    service.person("b")
    assert service.client.get("/v1/tokens").json()["next"] is None
    seen, after = [], {}
    while True:
        page = service.client.get("/v1/tokens", params={"limit": 2, **after}).json()
        seen += [(token["name"], token["valid"]) for token in page["tokens"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
        service.client.delete("/v1/tokens/a")  # where the first page ended nothing moves
    assert seen == [("a", True), ("b", True), ("b", False), ("c", True), ("d", True)]


def test_packages_are_listed_in_pages(service: Service) -> None:
    folder = service.home / "packages"
    folder.mkdir()
    hashes = [sign * 64 for sign in "0a3f"]
    for sha256 in hashes:
        (folder / f"{sha256}.zip").write_bytes(b"x" * 10)
    (folder / "a note.zip").write_text("of somebody")
    first = service.client.get("/v1/packages", params={"limit": 3}).json()
    assert first["packages"] == [{"sha256": sha256, "bytes": 10} for sha256 in sorted(hashes)[:3]]
    (folder / f"{sorted(hashes)[2]}.zip").unlink()  # the one that the cursor names
    rest = service.client.get("/v1/packages", params={"after": first["next"]}).json()
    assert ([one["sha256"] for one in rest["packages"]], rest["next"]) == ([max(hashes)], None)


def test_checkpoints_are_listed_in_pages_the_newest_first_each_in_order_of_step(service: Service) -> None:
    job_id = service.running()
    folder = service.run_dir(job_id) / "checkpoints"
    made = [f"step-{step:08d}-{'0' * 12}" for step in (100, 200, 300)]
    for name in made:
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text("{}")
    url = f"/v1/jobs/{job_id}/checkpoints"
    assert [one["folder"] for one in service.client.get(url).json()["checkpoints"]] == made
    page = service.client.get(url, params={"limit": 2}).json()
    assert [one["folder"] for one in page["checkpoints"]] == made[1:]
    rest = service.client.get(url, params={"limit": 2, "before": page["next"]}).json()
    assert ([one["folder"] for one in rest["checkpoints"]], rest["next"]) == (made[:1], None)
    assert service.client.get(url, params={"before": "step"}).json()["problems"][0]["path"] == "before"


# labels


def test_labels_are_those_of_the_submission_until_they_are_changed_and_the_run_is_told_nothing(
    service: Service,
) -> None:
    job_id = service.submit(labels={"team": "vision", "stage": "dev"})
    job = service.job(job_id)
    assert job["labels"] == job["spec"]["labels"] == {"team": "vision", "stage": "dev"}
    changed = service.client.patch(f"/v1/jobs/{job_id}", json={"labels": {"stage": None, "owner": "anna"}})
    assert changed.status_code == 200, changed.text
    assert changed.json()["labels"] == changed.json()["spec"]["labels"] == {"team": "vision", "owner": "anna"}
    assert names(service, label="stage=dev") == []
    assert names(service, label="owner=anna") == ["quickstart"]
    assert "labels" not in json.loads((service.run_dir(job_id) / "job.json").read_text())["spec"]
    assert changed.json()["wanted_workers"]["revision"] == 0
    lines = service.client.get("/v1/audit").json()["lines"]
    assert (lines[0]["what"], lines[0]["about"]) == ("change", "labels -stage owner=anna")


def test_a_job_that_is_over_can_be_labelled_and_not_resized_and_then_neither_happens(service: Service) -> None:
    job_id = service.running()
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn(2)
    url = f"/v1/jobs/{job_id}"
    assert service.client.patch(url, json={"labels": {"keep": "yes"}}).json()["labels"] == {"keep": "yes"}
    both = service.client.patch(url, json={"labels": {"keep": "no"}, "workers": {"max": 2}})
    assert (both.status_code, both.json()["code"]) == (409, "job_over")
    assert service.job(job_id)["labels"] == {"keep": "yes"}
    assert service.job(job_id)["state"] == JobState.SUCCEEDED


def test_labels_of_a_deleted_job_find_nothing_and_leave_nothing(service: Service) -> None:
    job_id = service.submit(labels={"team": "vision"})
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    service.turn(2)
    assert service.client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert names(service, label="team=vision") == []
    with service.plane.db.read() as session:
        assert session.scalars(select(LabelRow)).all() == []


def test_a_repeated_submission_with_other_labels_is_the_same_submission(service: Service) -> None:
    key = {"Idempotency-Key": "k1"}
    first = service.client.post("/v1/jobs", json=spec(labels={"try": "1"}), headers=key).json()
    again = service.client.post("/v1/jobs", json=spec(labels={"try": "2"}, seed=0), headers=key)
    assert (again.status_code, again.json()["id"]) == (202, first["id"])
    assert again.json()["labels"] == {"try": "1"}


@parametrize(
    ("labels", "path"),
    [
        ({"-team": "vision"}, "labels.-team"),
        ({"team": "two words"}, "labels.team"),
        ({"Example.com/team": "x"}, "labels.Example.com/team"),
        ({"team": 1}, "labels.team"),
        ({"team": None}, "labels.team"),
        ({f"k{number}": "" for number in range(33)}, "labels"),
        ({"a" * 64: ""}, "labels." + "a" * 64),
        (["team"], "labels"),
        ({"password": "hunter2hunter2"}, "labels.password"),
    ],
    usual=[0, 1, 5],
)
def test_labels_that_kubernetes_would_not_take_are_refused_by_their_place(
    shared_service: Service, labels: Any, path: str
) -> None:
    answer = shared_service.client.post("/v1/jobs", json=spec(labels=labels))
    assert answer.status_code == 422, answer.text
    assert [problem["path"] for problem in answer.json()["problems"]] == [path]


def test_a_label_that_looks_like_a_secret_is_refused_later_too(service: Service) -> None:
    job_id = service.submit()
    refused = service.client.patch(f"/v1/jobs/{job_id}", json={"labels": {"password": "hunter2hunter2"}})
    assert (refused.status_code, refused.json()["problems"][0]["path"]) == (422, "labels.password")
    assert "hunter2" not in refused.text


def test_no_more_labels_can_be_given_later_than_at_first(service: Service) -> None:
    job_id = service.submit(labels={f"k{number}": "" for number in range(32)})
    url = f"/v1/jobs/{job_id}"
    more = service.client.patch(url, json={"labels": {"one-more": ""}})
    assert (more.status_code, more.json()["problems"][0]["path"]) == (422, "labels")
    assert len(service.job(job_id)["labels"]) == 32
    assert service.client.patch(url, json={"labels": {"one-more": "", "k0": None}}).status_code == 200


def test_a_cluster_is_told_the_labels_that_hold_when_an_attempt_begins(service: Service) -> None:
    job_id = service.running(labels={"team": "vision"})
    assert service.launcher.submissions[job_id].metadata["label:team"] == "vision"
    service.client.patch(f"/v1/jobs/{job_id}", json={"labels": {"team": "text"}})
    service.launcher.lose(job_id)
    service.turn(4)
    assert service.launcher.submissions[f"{job_id}-attempt2"].metadata["label:team"] == "text"
