"""Signing in at an OpenID provider: a whole coordinator over TLS, a real provider over HTTP, and real redirects."""

from __future__ import annotations

import base64
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey
from openid_provider import CLIENT, SECRET, Provider, make_key

from edgefl.coordinator.api.sign_in import MAX_ANSWER_BYTES, SIGN_IN_S, OpenIdClient
from edgefl.coordinator.auth import RateLimiter
from edgefl.coordinator.directory import CoordinatorDirectory, StartOptions, init_directory, load_directory
from edgefl.coordinator.service import Coordinator
from edgefl.core.config import OpenIdSettings
from edgefl.core.errors import ConfigError, EdgeflError, NetworkError, NotAllowedError, TooManyTriesError
from edgefl.engine.assembly.build import build_run
from edgefl.simulation.local_fleet import find_free_port
from edgefl.storage.queries.history import read_history

ADA = {"sub": "1", "email": "ada@example.org", "email_verified": True}
SETTINGS = """
[openid]
issuer = "{issuer}"
client_id = "{client}"
client_secret = "{secret}"
viewers = ["staff"]
operators = ["Ada@example.org"]
admins = ["fleet-admins", "root@example.org"]
"""


@dataclass
class Site:
    coordinator: Coordinator
    directory: CoordinatorDirectory
    provider: Provider

    def browse(self) -> httpx.Client:
        """A browser without cookies; what it is sent to elsewhere it follows itself."""
        context = ssl.create_default_context(cafile=str(self.directory.ca_cert))
        return httpx.Client(verify=context, base_url=f"https://127.0.0.1:{self.directory.port}", timeout=20)

    def sign_in(self, browser: httpx.Client, change: Callable[[str], str] = str) -> str:
        """Goes to the provider and back as a browser does; returns where it ends. `change` is of the way back."""
        there = browser.get("/edgefl/v1/sign-in")
        assert there.status_code == 303, there.text
        if not there.headers["location"].startswith(self.provider.issuer):
            return str(there.headers["location"])
        back = httpx.get(there.headers["location"])
        assert back.status_code == 302, back.text
        ended = browser.get(change(back.headers["location"]))
        assert ended.status_code == 303, ended.text
        return str(ended.headers["location"])

    def access(self, browser: httpx.Client) -> tuple[Any, Any]:
        value = browser.get("/edgefl/v1/access").json()
        return value["user"], value["role"]

    def rejected(self) -> str:
        self.coordinator._rejections.flush(is_last=True)
        return str(read_history(self.coordinator._store, "events", where=["kind=request-rejected"])[-1]["message"])


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("openid") / "c"
    bare = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=find_free_port())
    with Provider() as provider:
        provider.callbacks = [f"https://127.0.0.1:{bare.port}/edgefl/v1/sign-in/callback"]
        with bare.settings.open("a") as file:
            file.write(SETTINGS.format(issuer=provider.issuer, client=CLIENT, secret=SECRET))
        directory = load_directory(root)
        assert SECRET not in repr(directory)
        options = StartOptions(host="0.0.0.0", port=bare.port, broker="embedded", broker_port=find_free_port())
        with Coordinator(directory, options, build_run) as coordinator:
            waiting = threading.Thread(target=coordinator.wait)
            waiting.start()
            try:
                yield Site(coordinator, directory, provider)
            finally:
                coordinator.stop()
                waiting.join()


@pytest.fixture
def site(whole_site: Site) -> Site:
    """The site, with an honest provider and no failures counted."""
    provider = whole_site.provider
    provider.person, provider.forge, provider.sign, provider.token_status = dict(ADA), dict, None, 200
    provider.asked.clear()
    whole_site.coordinator._auth._rate_limiter = RateLimiter(monotonic=time.monotonic)
    return whole_site


def test_a_person_signs_in_acts_under_the_own_name_and_signs_out(site: Site) -> None:
    with site.browse() as browser:
        assert site.sign_in(browser) == "/"
        access = browser.get("/edgefl/v1/access").json()
        assert (access["user"], access["role"], access["openid"]) == ("ada@example.org", "operator", "127.0.0.1")
        headers = {"Origin": str(browser.base_url).rstrip("/"), "X-Edgefl-Csrf": access["csrf_token"]}
        assert browser.post("/edgefl/v1/runs/none/stop", json={}, headers=headers).status_code == 404
        assert browser.post("/edgefl/v1/tokens", json={}, headers=headers).status_code == 403
        assert browser.get("/edgefl/v1/devices").status_code == 200
        assert browser.delete("/edgefl/v1/session", headers=headers).status_code == 200
        assert browser.get("/edgefl/v1/devices").status_code == 401
        assert list(browser.cookies) == []
    told = [(row["actor"], row["action"], row["outcome"]) for row in read_history(site.coordinator._store, "audit")]
    assert told[-4:] == [
        ("ada@example.org (operator)", "sign in by OpenID", "done"),
        ("ada@example.org (operator)", "POST runs/none/stop", "refused (404)"),
        ("ada@example.org (operator)", "POST tokens", "refused (403)"),
        ("ada@example.org (operator)", "DELETE session", "done"),
    ]


@pytest.mark.parametrize(
    ("person", "role"),
    [
        ({"sub": "2", "groups": ["guests", "staff"]}, "viewer"),
        ({"sub": "2", "groups": "fleet-admins"}, "admin"),
        ({**ADA, "groups": ["fleet-admins"]}, "admin"),
        ({**ADA, "email": "ADA@Example.org"}, "operator"),
    ],
)
def test_the_highest_role_of_address_and_claim_counts(site: Site, person: dict[str, Any], role: str) -> None:
    site.provider.person = person
    with site.browse() as browser:
        assert site.sign_in(browser) == "/"
        assert site.access(browser)[1] == role


@pytest.mark.parametrize(
    "person",
    [
        {"sub": "3"},
        {"sub": "3", "email": "eve@example.org", "email_verified": True},
        {**ADA, "email_verified": False},
        {**ADA, "email_verified": "true"},
        {"sub": "3", "email": "ada@example.org"},
        {"sub": "3", "groups": ["root@example.org", "guests", 7, None, {"a": 1}]},
        {"sub": "3", "groups": {"staff": True}},
        {"sub": "3", "email": "staff", "email_verified": True},
        {**ADA, "email": "ada@example.org\n"},
        {**ADA, "email": ["ada@example.org"]},
    ],
)
def test_whom_nobody_gave_a_role_is_refused(site: Site, person: dict[str, Any]) -> None:
    site.provider.person = person
    with site.browse() as browser:
        assert site.sign_in(browser) == "/#/sign-in/refused"
        assert site.access(browser) == (None, None)
    assert "has no role here" in site.rejected()


def unsigned(claims: dict[str, Any]) -> str:
    parts = [base64.urlsafe_b64encode(repr(each).replace("'", '"').encode()).rstrip(b"=").decode() for each in
             ({"alg": "none"}, {**claims, "email_verified": 1})]  # fmt: skip
    return f"{parts[0]}.{parts[1]}."


def with_other_key(claims: dict[str, Any]) -> str:
    return jwt.encode({"alg": "ES256"}, claims, make_key())


def with_the_client_s_secret(claims: dict[str, Any]) -> str:
    return jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(SECRET.ljust(32)), algorithms=["HS256"])


@pytest.mark.parametrize(
    ("forge", "sign"),
    [
        (lambda it: {**it, "iss": "https://evil.example"}, None),
        (lambda it: {**it, "aud": "another-client"}, None),
        (lambda it: {**it, "aud": ["another-client", CLIENT], "azp": "another-client"}, None),
        (lambda it: {**it, "nonce": "of-another-sign-in"}, None),
        (lambda it: {name: value for name, value in it.items() if name != "nonce"}, None),
        (lambda it: {**it, "exp": it["iat"] - 3600, "iat": it["iat"] - 7200}, None),
        (lambda it: {**it, "iat": it["iat"] + 3600}, None),
        (lambda it: {**it, "nbf": it["iat"] + 3600}, None),
        (lambda it: {name: value for name, value in it.items() if name != "exp"}, None),
        (lambda it: {name: value for name, value in it.items() if name != "sub"}, None),
        (dict, unsigned),
        (dict, with_other_key),
        (dict, with_the_client_s_secret),
        (dict, lambda _: "no.token"),
    ],
)
def test_an_id_token_that_is_not_for_this_sign_in_is_refused(site: Site, forge: Any, sign: Any) -> None:
    site.provider.forge, site.provider.sign = forge, sign
    with site.browse() as browser:
        assert site.sign_in(browser) == "/#/sign-in/refused"
        assert site.access(browser) == (None, None)
    assert "ID token does not count" in site.rejected()


def test_nobody_is_signed_in_with_a_code_that_is_not_of_the_own_browser(site: Site) -> None:
    with site.browse() as victim, site.browse() as attacker:
        there = attacker.get("/edgefl/v1/sign-in").headers["location"]
        back = httpx.get(there).headers["location"]
        assert victim.get(back).headers["location"] == "/#/sign-in/refused"
        assert site.access(victim) == (None, None)
        victim.get("/edgefl/v1/sign-in")
        assert victim.get(back).headers["location"] == "/#/sign-in/refused"
        assert site.provider.asked.count("/token") == 0, "no code is given away"
        assert attacker.get(back).headers["location"] == "/"
        assert attacker.get(back).headers["location"] == "/#/sign-in/refused", "the cookie is good once"
        assert site.access(attacker)[0] == "ada@example.org"


def test_a_code_of_somebody_else_is_worth_nothing_without_the_verifier(site: Site) -> None:
    with site.browse() as browser, site.browse() as other:
        stolen = parse_qs(
            urlsplit(httpx.get(other.get("/edgefl/v1/sign-in").headers["location"]).headers["location"]).query
        )
        way = site.sign_in(
            browser, lambda url: url.replace(parse_qs(urlsplit(url).query)["code"][0], stolen["code"][0])
        )
        assert way == "/#/sign-in/failed"
        assert site.access(browser) == (None, None)


def test_a_revoked_person_is_out_at_once_and_stays_out(site: Site) -> None:
    site.provider.person = {"sub": "9", "email": "root@example.org", "email_verified": True}
    with site.browse() as browser:
        assert site.sign_in(browser) == "/"
        assert site.access(browser) == ("root@example.org", "admin")
        site.coordinator._store.revoke_user("root@example.org", at=time.time())
        assert site.access(browser) == (None, None)
        assert site.sign_in(browser) == "/#/sign-in/refused"
    assert "is revoked here" in site.rejected()


def test_a_provider_that_fails_is_an_event_and_failures_are_slowed_down(site: Site) -> None:
    site.provider.token_status = 500
    with site.browse() as browser:
        ways = [site.sign_in(browser) for _ in range(11)]
    assert set(ways) == {"/#/sign-in/failed"}
    assert site.provider.asked.count("/token") == 10
    assert "too many wrong tries" in site.rejected()


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def settings(**changes: Any) -> OpenIdSettings:
    return OpenIdSettings(**{"issuer": "https://id.example", "client_id": CLIENT, "admins": ("a@b.c",), **changes})


CONFIGURATION = (
    b'{"issuer":"https://id.example","authorization_endpoint":"https://id.example/a",'
    b'"token_endpoint":"https://id.example/t","jwks_uri":"https://id.example/k"}'
)


def test_a_sign_in_has_ten_minutes_and_takes_no_memory() -> None:
    clock = Clock()
    client = OpenIdClient(settings(), clock=clock, fetch=lambda *_: CONFIGURATION)
    begun = [client.start("https://c/back") for _ in range(100)]
    assert client._provider is not None
    assert len({secret for _, secret in begun}) == 100
    location, secret = begun[0]
    state = parse_qs(urlsplit(location).query)["state"][0]

    def finish(secret: str = secret, state: str = state, code: str = "code") -> EdgeflError:
        with pytest.raises(EdgeflError) as raised:
            client.finish(secret, code=code, state=state, callback_url="https://c/back")
        return raised.value

    assert "ID token" in str(finish())
    for error in (finish(code=""), finish(secret="x"), finish(state="é"), finish(secret=f"{secret}x")):
        assert isinstance(error, NotAllowedError)
        assert "ID token" not in str(error)
    clock.now += SIGN_IN_S
    assert "longer than 600 s" in str(finish())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        CONFIGURATION.replace(b'issuer":"https://id.example"', b'issuer":"https://id.example/"'),
        CONFIGURATION.replace(b"https://id.example/t", b"http://id.example/t"),
        CONFIGURATION.replace(b'"https://id.example/k"', b"7"),
        CONFIGURATION.replace(b"https://id.example/a", b"javascript:alert(1)"),
    ],
)
def test_a_configuration_that_is_not_the_issuer_s_or_without_tls_is_refused(body: bytes) -> None:
    with pytest.raises(NetworkError):
        OpenIdClient(settings(), fetch=lambda *_: body).start("https://c/back")


def test_few_requests_wait_for_a_slow_provider_and_the_others_are_told() -> None:
    go, waiting = threading.Event(), threading.Semaphore(0)

    def fetch(*_: object) -> bytes:
        waiting.release()
        assert go.wait(30)
        return CONFIGURATION

    client = OpenIdClient(settings(), fetch=fetch)
    threads = [threading.Thread(target=client.start, args=("https://c/back",)) for _ in range(4)]
    for thread in threads:
        thread.start()
        assert waiting.acquire(timeout=30)
    with pytest.raises(TooManyTriesError):
        client.start("https://c/back")
    go.set()
    for thread in threads:
        thread.join(30)


def test_an_answer_without_end_is_cut_off(site: Site) -> None:
    site.provider.configuration = lambda value: {**value, "more": "x" * MAX_ANSWER_BYTES}
    try:
        with pytest.raises(NetworkError, match="too long"):
            OpenIdClient(settings(issuer=site.provider.issuer)).start("https://c/back")
    finally:
        site.provider.configuration = dict


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"issuer": "http://id.example"}, "https"),
        ({"issuer": "id.example"}, "https"),
        ({"client_id": ""}, "client_id"),
        ({"admins": ()}, "names nobody"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**changes)
