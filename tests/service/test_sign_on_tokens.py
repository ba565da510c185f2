"""Tokens of an issuer, against a real one on loopback: which are taken, which not, and what an outage changes."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import ECKey, RSAKey
from pydantic import ValidationError

from tests.service.control_plane_harness import Service, spec
from tests.service.issuer import CLIENT, PUBLIC, TestIssuer, issuer
from thinwire.contract.people import Role
from thinwire.service.config import Settings
from thinwire.service.db import Database
from thinwire.service.errors import Forbidden
from thinwire.service.people.oidc_issuer import PAUSE_S
from thinwire.service.people.oidc_people import IssuerPeople

ROLES = {"ml": "user", "ml-admins": "operator", "guests": "viewer"}
API = "https://thinwire.example/api"


@pytest.fixture(scope="module")
def real() -> Iterator[TestIssuer]:
    with issuer() as made:
        yield made


def at(home: Path, real: TestIssuer, **settings: Any) -> Service:
    """A service that takes the tokens of this issuer, by the clock of the day."""
    wanted = {"oidc_client_id": CLIENT, "oidc_roles": ROLES, "oidc_name": "idp", "oidc_audience": API, **settings}
    made = Service(home, oidc_issuer=real.url, **wanted)
    made.clock.follows = True
    return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, real: TestIssuer) -> Iterator[Service]:
    made = at(tmp_path_factory.mktemp("sign-on") / "home", real, oidc_cli_client_id=PUBLIC)
    yield made
    made.close()


def ask(service: Service, token: str, path: str = "/v1/jobs", method: str = "GET", **more: Any) -> Any:
    return service.client.request(method, path, headers={"Authorization": f"Bearer {token}"}, **more)


def pass_a_pause(service: Service) -> None:
    """The issuer may be asked again."""
    assert service.plane.oidc is not None
    service.plane.oidc.issuer._began -= PAUSE_S
    known = service.plane.oidc.issuer._known
    if known is not None:
        object.__setattr__(known, "at", known.at - PAUSE_S)


def test_a_token_is_worth_what_its_groups_are_mapped_to_and_no_more(served: Service, real: TestIssuer) -> None:
    anna = real.signed()
    assert ask(served, anna, "/v1/session").json()["name"] == "anna@idp"
    job = ask(served, anna, method="POST", json=spec())
    assert job.status_code == 202
    assert ask(served, anna, f"/v1/jobs/{job.json()['id']}").json()["submitted_by"] == "anna@idp"
    assert ask(served, anna, "/v1/tokens").status_code == 403
    assert ask(served, anna, "/v1/quotas?person=anna@idp").json()["quotas"][1]["person"] == "anna@idp"
    olga = real.signed(sub="olga", preferred_username="olga@example.com", groups=["ml", "ml-admins"])
    lines = ask(served, olga, "/v1/audit").json()["lines"]
    assert [(line["who"], line["issuer"], line["what"]) for line in lines][:1] == [("anna@idp", real.url, "submit")]
    assert ask(served, olga, "/v1/audit?who=anna@idp").json()["lines"] == lines
    assert "sign on at the issuer" in ask(served, anna, "/v1/session", "POST").json()["message"]
    guest = real.signed(sub="guest", preferred_username="guest", groups="guests")  # one text, as Google's `hd`
    assert ask(served, guest).status_code == 200
    assert ask(served, guest, method="POST", json=spec()).status_code == 403
    for groups in (["choir"], [], None, ["ML"], {"ml": True}, [["ml"]], 7):
        nobody = ask(served, real.signed(sub="nemo", preferred_username="nemo", groups=groups))
        assert nobody.status_code == 403, groups
        assert "nemo@idp has no role here" in nobody.json()["message"]
    people = ask(served, olga, "/v1/people").json()["people"]
    assert [(one["name"], one["subject"], one["role"]) for one in people] == [
        ("anna@idp", "anna", "user"),
        ("guest@idp", "guest", "viewer"),
        ("olga@example.com", "olga", "operator"),
    ]


KINDS: dict[str, Callable[[TestIssuer], str]] = {
    "an access token for this API": lambda real: real.signed(header={"typ": "at+jwt"}, aud=[API, "other"], azp="ci"),
    "an ID token of the page": lambda real: real.signed(azp=CLIENT),
    "an ID token of `thinwire login`": lambda real: real.signed(aud=PUBLIC, typ="ID"),
    "an ID token for two of us": lambda real: real.signed(aud=[CLIENT, PUBLIC], azp=PUBLIC),
    "that has just run out": lambda real: real.signed(exp=int(time.time()) - 10),
    "of a clock that is a little ahead": lambda real: real.signed(iat=int(time.time()) + 10, nbf=int(time.time()) + 10),
    "with a header that nobody knows": lambda real: real.signed(header={"x-of-this-issuer": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_these_tokens_are_taken(served: Service, real: TestIssuer, kind: str) -> None:
    assert ask(served, KINDS[kind](real)).status_code == 200


def _bare(header: object, payload: object, signature: str = "") -> str:
    return ".".join((*(_text(json.dumps(one).encode()) for one in (header, payload)), signature))


def _by_hand(header: object, payload: object, secret: bytes) -> str:
    """With the public key as a secret: what a checker that goes by the token's own `alg` takes for one."""
    said = _bare(header, payload)[:-1]
    return f"{said}.{_text(hmac.digest(secret, said.encode(), 'sha256'))}"


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


STRANGER = RSAKey.generate_key(2048, {"kid": "first"})
CURVE = ECKey.generate_key("P-256", {"kid": "first"})
FORGED: dict[str, tuple[Callable[[TestIssuer], str], str]] = {
    "alg none": (lambda real: _bare({"alg": "none"}, real.claims()), "none"),
    "alg None": (lambda real: _bare({"alg": "None", "kid": "first"}, real.claims()), "not supported"),
    "HS256 with the public key": (
        lambda real: _by_hand({"alg": "HS256", "kid": "first"}, real.claims(), real.key.as_pem(private=False)),
        "HS256",
    ),
    "another's key of the same name": (lambda real: real.signed(STRANGER), "bad_signature"),
    "another kind of key": (lambda real: real.signed(CURVE, {"alg": "ES256"}), "invalid_key"),
    "a key that comes along": (
        lambda real: real.signed(STRANGER, {"jwk": STRANGER.as_dict(private=False), "kid": "mine"}),
        "no key 'mine'",
    ),
    "a key at its own address": (lambda real: real.signed(STRANGER, {"jku": "https://evil.example"}), "bad_signature"),
    "crit": (lambda real: real.signed(header={"crit": ["b64"], "b64": True}), "crit"),
    "a changed claim": (
        lambda real: ".".join(
            (
                (parts := real.signed().split("."))[0],
                _bare({}, real.claims(groups=["ml-admins"])).split(".")[1],
                parts[2],
            )
        ),
        "bad_signature",
    ),
    "no signature": (lambda real: real.signed().rpartition(".")[0] + ".", "bad_signature"),
    "another issuer": (lambda real: real.signed(iss="https://evil.example"), "iss"),
    "the issuer with a slash": (lambda real: real.signed(iss=real.url + "/"), "iss"),
    "no issuer": (lambda real: real.signed(iss=None), "iss"),
    "another audience": (lambda real: real.signed(aud="grafana"), "audience"),
    "no audience": (lambda real: real.signed(aud=None), "aud"),
    "an empty audience": (lambda real: real.signed(aud=[]), "aud"),
    "an audience that is none": (lambda real: real.signed(aud={CLIENT: 1}), "aud"),
    "given to another client": (lambda real: real.signed(azp="grafana"), "azp"),
    "two audiences, for nobody": (lambda real: real.signed(aud=[CLIENT, "grafana"]), "azp"),
    "an access token of the page's": (lambda real: real.signed(header={"typ": "at+jwt"}), "audience"),
    "a logout token": (lambda real: real.signed(header={"typ": "logout+jwt"}), "another kind"),
    "a logout token without a type": (lambda real: real.signed(events={"http://openid.net/x": {}}), "another kind"),
    "Keycloak's refresh token": (lambda real: real.signed(typ="Refresh"), "another kind"),
    "a type that is no text": (lambda real: real.signed(typ=["ID"]), "another kind"),
    "run out": (lambda real: real.signed(exp=int(time.time()) - 100), "expired"),
    "that never runs out": (lambda real: real.signed(exp=None), "exp"),
    "a time that is none": (lambda real: real.signed(exp="tomorrow"), "exp"),
    "a time without an end": (lambda real: real.signed(exp=float("inf")), "exp"),
    "a time that is not one": (lambda real: real.signed(exp=float("nan")), "exp"),
    "a time that is a truth": (lambda real: real.signed(exp=True), "exp"),
    "not yet": (lambda real: real.signed(nbf=int(time.time()) + 100), "not yet valid"),
    "of the future": (lambda real: real.signed(iat=int(time.time()) + 100), "in the future"),
    "nobody": (lambda real: real.signed(sub=None), "sub"),
    "an empty subject": (lambda real: real.signed(sub=""), "sub"),
    "a subject with NUL": (lambda real: real.signed(sub="a\0b"), "sub"),
    "a long subject": (lambda real: real.signed(sub="x" * 256), "sub"),
    "without a name": (lambda real: real.signed(preferred_username=None), "preferred_username"),
    "a name of signs alone": (lambda real: real.signed(preferred_username="../.."), "no name"),
    "a long name": (lambda real: real.signed(preferred_username="a" * 64), "no name"),
    "not JSON": (lambda real: "a.b.c", "decode"),
    "a list for a header": (lambda real: _bare([], real.claims(), "x"), "missing_algorithm"),
    "a header that is a text": (lambda real: _bare("alg", real.claims(), "x"), "cannot be read"),
    "a deep header": (lambda real: f"{_text(b'[' * 1400)}.b.c", "cannot be read"),
    "two dots and no more": (lambda real: "..", "decode"),
    "a long header": (lambda real: real.signed(header={"x": "y" * 3000}), "size"),
    "five parts": (lambda real: "a.b.c.d.e", ""),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_token_is_one_and_the_same_401_and_the_log_says_why(
    served: Service, real: TestIssuer, forgery: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert served.plane.oidc is not None
    served.plane.callers._guesses._buckets.clear()
    served.plane.oidc.tokens._said._buckets.clear()
    make, why = FORGED[forgery]
    token = make(real)
    with caplog.at_level(logging.WARNING):
        answer = ask(served, token)
    unknown = ask(served, "x" * 40)
    assert answer.status_code == 401, answer.text
    assert {**answer.json(), "request_id": ""} == {**unknown.json(), "request_id": ""}
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    said = [line.getMessage() for line in caplog.records if line.getMessage().startswith("issued_token_refused")]
    assert [why in line for line in said] == ([True] if token.count(".") == 2 else []), said
    assert not any(part in caplog.text for part in token.split(".") if len(part) > 20)
    assert served.client.get("/v1/jobs").status_code == 200  # the operator, from the same address


SEVERAL = {"leads": "*", "vision-team": "vision", "ml-admins": "vision", "nlp-admins": "nlp"}


def test_a_group_is_of_a_project_and_who_has_one_sees_no_other(
    tmp_path: Path, real: TestIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    service = at(tmp_path / "home", real, oidc_projects=SEVERAL, oidc_roles={**ROLES, "nlp-admins": "operator"})
    try:
        for named in (1, 0):  # a name that is misspelt is told at the start, not to the first who submits
            caplog.clear()
            service.plane.name_unknown_projects()
            assert caplog.text.count("project_unknown setting=THINWIRE_OIDC_PROJECTS project=vision") == named
            for name in ("vision", "nlp"):
                assert service.client.post("/v1/projects", json={"name": name}).status_code in (201, 409)
        people = {
            "vera": (["ml", "vision-team"], "vision"),
            "otto": (["ml-admins"], "vision"),
            "lena": (["ml", "vision-team", "leads"], "*"),
            "anna": (["ml"], "default"),
        }
        tokens = {
            name: real.signed(sub=name, preferred_username=name, groups=groups) for name, (groups, _) in people.items()
        }
        for name, (_, project) in people.items():
            assert ask(service, tokens[name], "/v1/session").json()["project"] == project, name
        mine = ask(service, tokens["vera"], method="POST", json=spec()).json()["id"]
        assert ask(service, tokens["anna"], f"/v1/jobs/{mine}").status_code == 404
        assert ask(service, tokens["lena"], f"/v1/jobs/{mine}").status_code == 200
        assert ask(service, tokens["otto"], "/v1/audit").json()["lines"][0]["project"] == "vision"
        assert ask(service, tokens["otto"], "/v1/people").status_code == 403  # they are of the whole service
        assert ask(service, tokens["anna"], "/v1/jobs?project=vision").status_code == 404
        # In several: the first without a choice, and in each the role of the groups that are of it, or of none.
        vera = real.signed(sub="vera", preferred_username="vera", groups=["vision-team", "nlp-admins", "ml"])
        session = ask(service, vera, "/v1/session").json()
        assert (session["project"], session["role"], session["projects"]) == ("vision", "user", ["nlp", "vision"])
        assert ask(service, vera, f"/v1/jobs/{mine}").status_code == 200
        chosen = {"Thinwire-Project": "nlp", "Authorization": f"Bearer {vera}"}
        session = service.client.get("/v1/session", headers=chosen).json()
        assert (session["project"], session["role"], session["projects"]) == ("nlp", "operator", ["nlp", "vision"])
        there = service.client.post("/v1/jobs", json=spec(), headers=chosen).json()["id"]
        assert service.client.get(f"/v1/jobs/{there}").json()["submitted_by"] == "vera@idp"
        for where, seen in (("", mine), ("?project=vision", mine), ("?project=nlp", there)):
            assert [one["id"] for one in ask(service, vera, f"/v1/jobs{where}").json()["jobs"]] == [seen]
        assert service.client.get("/v1/jobs?project=vision", headers=chosen).json()["jobs"][0]["id"] == mine
        assert ask(service, vera, "/v1/audit").status_code == 403  # a user there
        assert {one["project"] for one in ask(service, vera, "/v1/audit?project=nlp").json()["lines"]} == {"nlp"}
        assert (
            ask(service, vera, "/v1/tokens?project=nlp", method="POST", json={"name": "a"}).json()["project"] == "nlp"
        )
        assert ask(service, vera, f"/v1/jobs/{mine}/cancel?project=nlp", method="POST").status_code == 422
        assert ask(service, vera, "/v1/jobs?project=default").status_code == 404
        assert [one["name"] for one in ask(service, vera, "/v1/projects").json()["projects"]] == ["nlp", "vision"]
        assert [one["name"] for one in ask(service, vera, "/v1/projects?project=nlp").json()["projects"]] == ["nlp"]
        assert ask(service, tokens["vera"], f"/v1/jobs/{there}").status_code == 404  # without the group
        operator = real.signed(sub="olga", preferred_username="olga", groups=["ml-admins", "leads"])
        assert ask(service, operator, "/v1/session").json()["project"] == "*"
        gone = real.signed(sub="gil", preferred_username="gil", groups=["guests"])
        assert ask(service, gone, "/v1/session").json()["project"] == "default"
    finally:
        service.close()


def test_a_new_key_is_read_once_and_one_that_nobody_has_not_again_and_again(tmp_path: Path, real: TestIssuer) -> None:
    service = at(tmp_path / "home", real)
    try:
        assert ask(service, real.signed()).status_code == 200
        old = real.key
        real.rotate("second")
        pass_a_pause(service)
        before = real.asked.count("/oauth/jwks.json")
        assert ask(service, real.signed(old)).status_code == 200  # a token of the old key lives on until it is read
        assert real.asked.count("/oauth/jwks.json") == before
        assert ask(service, real.signed()).status_code == 200
        assert ask(service, real.signed(old)).status_code == 401
        for number in range(20):
            assert ask(service, real.signed(STRANGER, {"kid": f"made up {number}"})).status_code == 401
        assert real.asked.count("/oauth/jwks.json") == before + 1
    finally:
        service.close()


def test_an_issuer_that_is_gone_locks_out_nobody_who_has_a_token_and_never_the_operator(tmp_path: Path) -> None:
    with issuer() as real:
        service = at(tmp_path / "home", real)
        token = real.signed()
        assert ask(service, token).status_code == 200
        key, port = real.key, real.port
    try:
        pass_a_pause(service)
        assert ask(service, token).status_code == 200
        assert ask(service, real.signed(STRANGER, {"kid": "made up"})).status_code == 401
        assert service.client.get("/v1/sign-on").json()["trouble"] is True
        service.close()
        service.open()  # and it has forgotten the keys
        for _ in range(3):
            refused = ask(service, token)
            assert refused.status_code == 503, refused.text
            assert "tokens of this service are taken" in refused.json()["message"]
        assert service.client.get("/v1/jobs").status_code == 200
        back = TestIssuer(port, key)
        try:
            pass_a_pause(service)
            assert ask(service, token).status_code == 200
        finally:
            back.stop()
    finally:
        service.close()


def test_a_name_is_whose_who_came_with_it_first_and_who_is_blocked_stays_out(tmp_path: Path, real: TestIssuer) -> None:
    service = at(tmp_path / "home", real)
    try:
        anna, renamed = real.signed(), real.signed(preferred_username="Anna Smith")
        other = real.signed(sub="eve", preferred_username="Anna")
        assert ask(service, anna).status_code == 200
        assert ask(service, renamed, "/v1/session").json()["name"] == "anna@idp"
        refused = ask(service, other)
        assert refused.status_code == 403
        assert "the name of somebody else" in refused.json()["message"]
        assert service.client.put("/v1/people/anna@idp/block").status_code == 204
        assert service.client.put("/v1/people/anna@idp/block").status_code == 204
        for token in (anna, renamed):
            blocked = ask(service, token)
            assert blocked.status_code == 401
            assert "anna@idp was blocked here" in blocked.json()["message"]
        assert service.client.delete("/v1/people/anna@idp").status_code == 204
        assert ask(service, other, "/v1/session").json()["name"] == "anna@idp"
        assert service.client.put("/v1/people/mallory@idp/block").status_code == 204  # who has not come yet
        mallory = real.signed(sub="m", preferred_username="mallory")
        assert ask(service, mallory).status_code == 401
        assert service.client.delete("/v1/people/mallory@idp/block").status_code == 204
        service.plane.callers._wrong._held.clear()  # else in some seconds
        assert ask(service, mallory).status_code == 200
        assert service.client.delete("/v1/people/nobody@idp").status_code == 404
        assert service.client.put("/v1/people/nobody/block").status_code == 422
        done = [line["what"] for line in service.client.get("/v1/audit").json()["lines"] if line["status"] < 400]
        assert done == ["unblock_person", "block_person", "release_person", "block_person", "block_person"]
    finally:
        service.close()


@pytest.mark.slow
def test_an_address_of_mail_counts_where_the_issuer_has_verified_it(tmp_path: Path, real: TestIssuer) -> None:
    by_mail = {"oidc_name_claim": "email", "oidc_groups_claim": "email", "oidc_roles": {"anna@example.com": "user"}}
    service = at(tmp_path / "home", real, **by_mail)
    try:
        for verified, status in ((True, 200), ("true", 200), (False, 401), (None, 401), ("false", 401), (1.5, 401)):
            token = real.signed(email="anna@example.com", email_verified=verified)
            assert ask(service, token).status_code == status, verified
        assert ask(service, real.signed(email="eve@example.com", email_verified=True)).status_code == 403
    finally:
        service.close()


@pytest.mark.slow
def test_roles_may_stand_deep_in_a_token_and_settings_that_are_half_are_refused(
    tmp_path: Path, real: TestIssuer
) -> None:
    service = at(tmp_path / "home", real, oidc_groups_claim="realm_access.roles")
    try:
        assert ask(service, real.signed(realm_access={"roles": ["ml"]})).status_code == 200
        assert ask(service, real.signed(realm_access=["ml"])).status_code == 403
    finally:
        service.close()
    for wrong in (
        {"oidc_issuer": "http://idp.example"},
        {"oidc_issuer": "https://a:b@idp.example"},
        {"oidc_issuer": "https://idp.example?x=1"},
        {"oidc_issuer": "https://idp.example"},
        {"oidc_client_id": "thinwire"},
        {"oidc_issuer": "https://idp.example", "oidc_client_id": "x", "oidc_roles": {"ml": "admin"}},
        {"oidc_issuer": "https://idp.example", "oidc_client_id": "x", "oidc_scopes": "profile"},
    ):
        with pytest.raises(ValidationError, match=r"(?i)oidc"):
            Settings(home=tmp_path, **wrong)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_of_many_who_come_with_one_name_at_once_one_has_it(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if kind == "sqlite" else request.getfixturevalue("new_database")()
    db = Database(url)
    db.upgrade()
    people = IssuerPeople(db, "https://idp.example", {"ml": Role.USER}, {}, clock=time.time)
    start = threading.Barrier(24)
    found: dict[int, str] = {}

    def come(number: int) -> None:
        start.wait()
        try:
            with db.read() as session:
                found[number] = people.admit(session, f"sub-{number % 3}", "anna@idp", ["ml"]).name
        except Forbidden:
            found[number] = "refused"

    threads = [threading.Thread(target=come, args=(number,)) for number in range(24)]
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join(120)
        (row,) = people.list(10, None).people
        assert {number: words == "anna@idp" for number, words in found.items()} == {
            number: f"sub-{number % 3}" == row.subject for number in range(24)
        }
    finally:
        db.close()
