"""Sign-on for the page by a real issuer on loopback: there and back, and all that may go wrong in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.service.control_plane_harness import Service, spec
from tests.service.issuer import CLIENT, PASSWORD, PUBLIC, SECRET, Surfer, TestIssuer, issuer
from thinwire.service.people.oidc_issuer import MOST_WAITING
from thinwire.service.web import sign_on

PAGE = "http://testserver"
SAME = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def real() -> Iterator[TestIssuer]:
    with issuer() as made:
        made.client(CLIENT, SECRET, f"{PAGE}/v1/sign-on-end")
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, real: TestIssuer) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("sign-on")
    (folder / "secret").write_text(SECRET + "\n")
    made = Service(
        folder / "home",
        oidc_issuer=real.url,
        oidc_client_id=CLIENT,
        oidc_client_secret_file=folder / "secret",
        oidc_page_url=PAGE,
        oidc_scopes="openid profile email groups",
        oidc_name="idp",
        oidc_roles={"ml": "user", "ml-admins": "operator"},
    )
    made.clock.follows = True
    yield made
    made.close()


class Browser:
    """Keeps this service's cookies, and has no token."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.cookies: dict[str, str] = {}
        self.said: list[str] = []

    def send(self, path: str, method: str = "GET", **more: Any) -> Any:
        kept = self.service.client.headers.pop("Authorization")
        headers = {**SAME, "Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        try:
            answer = self.service.client.request(method, path, headers=headers, follow_redirects=False, **more)
        finally:
            self.service.client.headers["Authorization"] = kept
            self.service.client.cookies.clear()
        for said in answer.headers.get_list("set-cookie"):
            self.said.append(said)
            name, _, value = said.partition(";")[0].partition("=")
            self.cookies[name] = value
            if "Max-Age=0" in said:
                del self.cookies[name]
        return answer

    def leave(self, view: str = "") -> str:
        answer = self.send("/v1/sign-on-begin", params={"view": view})
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])

    def come_back(self, place: str) -> str:
        """Where the service sends whom the issuer has sent to this place."""
        assert place.startswith(f"{PAGE}/v1/sign-on-end?"), place
        answer = self.send(place.removeprefix(PAGE))
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])


def test_who_signs_on_has_a_session_of_their_own_and_the_audit_says_by_which_issuer(
    served: Service, real: TestIssuer
) -> None:
    browser = Browser(served)
    asked = browser.leave()
    sent = {name: one for name, (one,) in parse_qs(urlsplit(asked).query).items()}
    assert (sent["code_challenge_method"], sent["response_type"]) == ("S256", "code")
    assert len({sent["state"], sent["nonce"], sent["code_challenge"], *browser.cookies.values()}) == 4
    assert all("SameSite=Lax" in said and "HttpOnly" in said for said in browser.said)
    assert browser.come_back(Surfer().sign_in(asked, "anna")) == "../#/?sign-on=done"
    assert set(browser.cookies) == {"thinwire_session"}
    assert "Max-Age=28800; HttpOnly; SameSite=Strict" in browser.said[-2]
    me = browser.send("/v1/session").json()
    assert (me["name"], me["role"]) == ("anna@idp", "user")
    assert browser.send("/v1/jobs", "POST", json=spec()).status_code == 202
    assert browser.send("/v1/tokens").status_code == 403
    lines = served.client.get("/v1/audit?who=anna@idp").json()["lines"]
    assert [(line["what"], line["issuer"], line["status"]) for line in lines] == [
        ("submit", real.url, 202),
        ("sign_in", real.url, 303),
    ]
    assert browser.send("/v1/session", "DELETE").status_code == 204
    assert browser.cookies == {}


def test_who_signs_out_here_is_signed_out_at_the_issuer_where_the_settings_say_so(
    served: Service, real: TestIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.plane.oidc is not None
    browser, surfer = Browser(served), Surfer()
    browser.come_back(surfer.sign_in(browser.leave(), "anna"))
    assert browser.send("/v1/session").json()["issuer_signs_out"] is False
    assert browser.send("/v1/sign-off").headers["location"] == "../#/"  # without the cookie nobody goes anywhere
    monkeypatch.setattr(served.plane.oidc, "signs_out", True)
    browser.come_back(surfer.sign_in(browser.leave(), "anna"))
    assert set(browser.cookies) == {"thinwire_session", "thinwire_issued"}
    assert all("HttpOnly; SameSite=Strict" in said for said in browser.said if said.startswith("thinwire_issued"))
    assert browser.send("/v1/session").json()["issuer_signs_out"] is True
    token = browser.cookies["thinwire_issued"]
    assert browser.send("/v1/session", "DELETE").status_code == 204
    place = str(browser.send("/v1/sign-off").headers["location"])
    sent = {name: one for name, (one,) in parse_qs(urlsplit(place).query).items()}
    assert sent == {"client_id": CLIENT, "post_logout_redirect_uri": f"{PAGE}/", "id_token_hint": token}
    assert browser.cookies == {}
    asked_again = browser.leave()
    assert surfer.get(asked_again)[1].startswith(f"{PAGE}/")  # the issuer still knows the browser
    status, back, text = surfer.get(place)
    assert (status, back) == (302, f"{PAGE}/"), text  # it asks nothing
    assert not surfer.get(browser.leave())[1].startswith(f"{PAGE}/")
    monkeypatch.setattr(sign_on, "LONGEST_HINT", 10)
    browser.come_back(Surfer().sign_in(browser.leave(), "anna"))
    assert browser.cookies["thinwire_issued"] == "-"
    assert "id_token_hint" not in str(browser.send("/v1/sign-off").headers["location"])
    assert browser.send("/v1/sign-on-end?state=a&state=b").headers["location"].endswith("sign-on=refused")


def test_a_session_ends_when_its_person_is_blocked_and_when_its_groups_are_worth_less(
    served: Service, real: TestIssuer
) -> None:
    browser = Browser(served)
    browser.come_back(Surfer().sign_in(browser.leave(), "olga"))
    assert browser.send("/v1/tokens").status_code == 200
    served.plane.people._roles = {**served.plane.people._roles, "ml-admins": served.plane.people._roles["ml"]}
    assert browser.send("/v1/session").json()["role"] == "user"
    assert browser.send("/v1/tokens").status_code == 403
    assert served.client.put("/v1/people/olga@idp/block").status_code == 204
    out = browser.send("/v1/session")
    assert (out.status_code, "was blocked" in out.json()["message"]) == (401, True)
    again = Browser(served)
    assert again.come_back(Surfer().sign_in(again.leave(), "olga")).endswith("#/?sign-on=person")
    assert again.cookies == {}
    line = served.client.get("/v1/audit?who=olga@idp").json()["lines"][0]
    assert (line["what"], line["status"]) == ("sign_in", 401)
    assert served.client.delete("/v1/people/olga@idp/block").status_code == 204
    served.plane.callers._wrong._held.clear()  # else in some seconds
    assert browser.send("/v1/session").status_code == 200
    assert served.client.delete("/v1/people/olga@idp").status_code == 204
    assert browser.send("/v1/session").status_code == 401
    served.plane.callers._wrong._held.clear()
    with served.plane.db.read() as session:  # another account of the issuer now has the name
        served.plane.people.admit(session, "another", "olga@idp", ["ml"])
    assert "somebody else's name" in browser.send("/v1/session").json()["message"]


def test_who_has_no_role_is_told_so_and_leaves_no_name(served: Service) -> None:
    browser = Browser(served)
    assert browser.come_back(Surfer().sign_in(browser.leave(), "nemo")).endswith("#/?sign-on=person")
    assert browser.cookies == {}
    assert "nemo@idp" not in served.client.get("/v1/people").text


def test_what_comes_back_otherwise_begins_no_session(served: Service, real: TestIssuer) -> None:
    mine, other = Browser(served), Browser(served)
    place = Surfer().sign_in(mine.leave(), "anna")
    other.leave()
    tried = {
        "without having left": (Browser(served), place, "state"),
        "in another browser": (other, place, "state"),
        "with another state": (mine, place.replace("state=", "state=x"), "state"),
        "without a state": (mine, place.replace("state=", "nostate="), "state"),
        "from another issuer": (mine, f"{PAGE}/v1/sign-on-end?code=1&iss=https://evil.example", "state"),
    }
    for why, (browser, where, reason) in tried.items():
        kept = dict(browser.cookies)
        assert browser.come_back(where).endswith(f"#/?sign-on={reason}"), why
        assert browser.cookies == {}, why
        browser.cookies = kept
    asked = parse_qs(urlsplit(mine.leave()).query)
    state = asked["state"][0]
    for query, reason in (
        (f"state={state}&error=access_denied", "refused"),
        (f"state={state}&code=made-up", "refused"),
        (f"state={state}&iss=https://evil.example&code=x", "state"),
        (f"state={state}", "refused"),
        (f"state={state}&code=x&next=https://evil.example", "refused"),
    ):
        kept = dict(mine.cookies)
        assert mine.come_back(f"{PAGE}/v1/sign-on-end?{query}") == f"../#/?sign-on={reason}", query
        mine.cookies = kept
    used = Browser(served)
    place = Surfer().sign_in(used.leave("jobs/x"), "anna")
    kept = dict(used.cookies)
    assert used.come_back(place) == "../#/jobs/x?sign-on=done"
    used.cookies = kept
    assert used.come_back(place) == "../#/jobs/x?sign-on=refused"  # a code is taken once


@pytest.mark.parametrize(
    "view", ["//evil.example", "https://evil.example", "\\\\evil.example", "a\r\nSet-Cookie: x", "?a"]
)
def test_the_way_back_leads_to_the_page_whatever_is_asked_for(served: Service, view: str) -> None:
    """By the address, and by a cookie that somebody else has made."""
    browser = Browser(served)
    answer = browser.send("/v1/sign-on-begin", params={"view": view})
    if answer.status_code == 303:
        assert browser.come_back(f"{PAGE}/v1/sign-on-end?error=x") == f"../#/{view}?sign-on=state"
    else:
        assert answer.status_code == 422
        browser.cookies = {"thinwire_sign_on": f"secret.{view}".replace("\r\n", "")}
        assert browser.come_back(f"{PAGE}/v1/sign-on-end?error=x") == "../#/?sign-on=state"


def test_the_verifier_is_what_the_issuer_asks_for(served: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code that was stolen on the way is of no use to who has not begun: PKCE, checked by the issuer."""
    import thinwire.service.people.oidc as oidc

    browser = Browser(served)
    place = Surfer().sign_in(browser.leave(), "anna")
    real_one = oidc._derived
    monkeypatch.setattr(oidc, "_derived", lambda secret, what: real_one(secret, what.replace("verifier", "guess")))
    assert browser.come_back(place) == "../#/?sign-on=refused"


def test_few_exchanges_with_the_issuer_are_under_way_at_once(served: Service) -> None:
    """Strangers may ask for one with a state of their own, and each holds a thread until the issuer has answered."""
    assert served.plane.oidc is not None
    browser = Browser(served)
    place = Surfer().sign_in(browser.leave(), "anna")
    exchanges = served.plane.oidc.issuer._exchanges
    for _ in range(MOST_WAITING):
        assert exchanges.acquire(blocking=False)
    try:
        kept = dict(browser.cookies)
        assert browser.come_back(place) == "../#/?sign-on=gone"
    finally:
        exchanges.release(MOST_WAITING)
    browser.cookies = kept
    assert browser.come_back(place) == "../#/?sign-on=done"


def test_an_issuer_that_is_gone_is_said_and_a_token_signs_in(tmp_path: Path) -> None:
    with issuer() as real:
        url = real.url
    service = Service(tmp_path / "home", oidc_issuer=url, oidc_client_id=CLIENT, oidc_roles={"ml": "user"})
    try:
        assert Browser(service).leave() == "../#/?sign-on=gone"
        assert service.client.get("/v1/sign-on").json()["trouble"] is True
        assert service.client.post("/v1/session").status_code == 201
    finally:
        service.close()
    without = Service(tmp_path / "other")
    try:
        assert without.client.get("/v1/sign-on").json()["issuer"] is None
        for path in ("/v1/sign-on-begin", "/v1/sign-on-end?code=x&state=y"):
            assert Browser(without).send(path).status_code == 404
    finally:
        without.close()


@pytest.mark.slow
def test_a_person_signs_on_in_a_browser_below_a_prefix_and_comes_back_to_where_they_were(tmp_path: Path) -> None:
    """All of it as a person has it: the button, the issuer's own form, the page; then blocked, and the issuer gone."""
    from tests.web.browser import Desk, chromium, findings
    from tests.web.test_page import below

    with chromium() as browser, issuer() as real:
        desk = Desk(
            tmp_path / "home",
            browser,
            oidc_issuer=real.url,
            oidc_client_id=PUBLIC,
            oidc_scopes="openid profile email groups",
            oidc_name="idp",
            oidc_roles={"ml": "user"},
        )

        desk.service.clock.follows = True
        try:
            job_id = desk.running(name="watched")
            with below(desk.service.app, "/team/thinwire") as url:
                assert desk.service.plane.oidc is not None
                desk.service.plane.oidc.page_url = url.rstrip("/")
                real.client(PUBLIC, None, f"{url}v1/sign-on-end")
                page = desk.page(f"{url}#/jobs/{job_id}/events")
                page.get_by_role("link", name="Sign on with idp").wait_for()
                assert findings(page) == []
                page.keyboard.press("Shift+Tab")  # from the token's field, by the keyboard alone
                page.keyboard.press("Enter")
                page.locator("input[name=login]").fill("anna")
                page.locator("input[name=login]").press("Enter")
                page.locator("input[name=password]").fill(PASSWORD)
                page.locator("input[name=password]").press("Enter")
                page.get_by_role("button", name="Sign out").wait_for()
                page.get_by_text("anna@idp (user)").wait_for()
                assert page.url == f"{url}#/jobs/{job_id}/events"
                cookies = {one["name"].rpartition("_")[0]: one for one in page.context.cookies()}
                held = cookies["thinwire_session"]
                assert (held["path"], held["httpOnly"], held["sameSite"]) == ("/team/thinwire/v1", True, "Strict")
                assert "thinwire_sign_on" not in cookies
                page.reload()
                page.get_by_role("button", name="Sign out").wait_for()

                operator = desk.signed_in("#/people", url=url)
                operator.get_by_role("button", name="Block anna@idp", exact=True).click()
                operator.get_by_role("dialog").get_by_role("button", name="Block").click()
                operator.get_by_role("button", name="Unblock anna@idp").wait_for()
                assert findings(operator) == []
                page.get_by_text("anna@idp was blocked here").wait_for()
                page.get_by_role("link", name="Sign on with idp").click()  # the issuer still knows the browser
                page.get_by_text("you may do nothing here").wait_for()
                operator.get_by_role("button", name="Unblock anna@idp").click()
                operator.get_by_role("button", name="Block anna@idp", exact=True).wait_for()
                page.get_by_role("link", name="Sign on with idp").click()
                page.get_by_role("button", name="Sign out").click()

                real.stop()
                desk.service.plane.oidc.issuer._known = None
                page.get_by_role("link", name="Sign on with idp").click()
                page.get_by_text("does not answer now").wait_for()
                page.get_by_label("Your token").fill(desk.service.token)
                page.keyboard.press("Enter")
                page.get_by_text("operator (operator").wait_for()
                assert [one for one in desk.complaints if "default-src 'self'" not in one] == []  # the issuer's own
        finally:
            desk.close()
