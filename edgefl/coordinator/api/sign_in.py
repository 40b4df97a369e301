"""Routes of signing in and out: who the caller is, the session of a page, and sign-in at an OpenID provider.

OpenID Connect Core 1.0, the authorization code flow with PKCE (RFC 7636). The browser goes to the provider and comes
back with a code, for which the provider gives an ID token over a connection of our own. `[openid]` in `settings.toml`
says who may come with which role. What a sign-in needs is derived from a random text in a cookie of ten minutes, so
that nobody who only starts sign-ins takes memory.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from edgefl import __version__
from edgefl.coordinator.api.access import MAX_TOKEN_CHARS, Authenticator, Identity
from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.auth import get_request_source
from edgefl.coordinator.enrolment.tokens import USER_ROLES, check_user_name
from edgefl.core.config import OpenIdSettings, is_secure_url
from edgefl.core.errors import EdgeflError, NetworkError, NotAllowedError, TooManyTriesError, UsageError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.safe_parsing import parse_message
from edgefl.core.types import Json

log = logging.getLogger(__name__)

CALLBACK_PATH = "/edgefl/v1/sign-in/callback"
SIGN_IN_S = 600.0
CLOCK_LEEWAY_S = 60
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 1024
MAX_CONCURRENT = 4
"""Requests to the provider at a time; more sign-ins are asked to come again."""
# Signatures that need the provider's private key: neither `none` nor a secret that others may know.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")


def sign_in_router(context: ApiContext) -> APIRouter:
    """Returns the routes of access and sessions, below `/edgefl/v1`."""
    router, auth, settings = APIRouter(prefix="/edgefl/v1"), context.auth, context.directory.openid
    openid = None if settings.issuer is None else OpenIdClient(settings)
    if openid is not None:
        _add_openid_routes(router, context, openid)

    @router.get("/access")
    def get_access(request: Request, response: Response) -> Json:
        response.headers["Cache-Control"] = "no-store"
        identity, session = auth.find_identity(request), auth.find_session(request)
        may_read = auth.is_open or identity is not None
        return {
            "v": PROTOCOL_VERSION,
            "reads": may_read,
            "acts": identity is not None and identity.has_role("operator"),
            "user": None if identity is None else identity.name,
            "role": None if identity is None else identity.role,
            "csrf_token": None if identity is None or session is None else session.csrf_token,
            "openid": None if openid is None else openid.name,
            **({"version": __version__, "fleet": context.directory.fleet} if may_read else {}),
        }

    @router.post("/session")
    def start_session(request: Request, response: Response) -> Json:
        identity = auth.sign_in(request, response)
        return {"v": PROTOCOL_VERSION, "user": identity.name, "role": identity.role}

    @router.delete("/session")
    def end_session(request: Request, response: Response) -> Json:
        auth.end_session(request, response)
        return {"v": PROTOCOL_VERSION}

    return router


def _add_openid_routes(router: APIRouter, context: ApiContext, openid: OpenIdClient) -> None:
    # Lax, not Strict: the browser comes back from another site. The session's own cookie is Strict.
    cookie = f"__Host-edgefl-sign-in-{context.directory.port}"
    attributes: Any = {"path": "/", "secure": True, "httponly": True, "samesite": "lax"}
    auth = context.auth

    @router.get("/sign-in")
    def go_to_provider(request: Request) -> Response:
        try:
            with auth.limit_failures(request):
                location, secret = openid.start(_get_callback_url(request))
        except EdgeflError as error:
            return _fail(context, request, error)
        response = RedirectResponse(location, status_code=303)
        response.set_cookie(cookie, secret, max_age=int(SIGN_IN_S), **attributes)
        return response

    @router.get("/sign-in/callback")
    def come_back(request: Request, code: str = "", state: str = "") -> Response:
        secret = request.cookies.get(cookie, "")[:MAX_TOKEN_CHARS]
        try:
            with auth.limit_failures(request):
                name, role = openid.finish(secret, code=code, state=state, callback_url=_get_callback_url(request))
                identity = _admit(context, name, role)
        except EdgeflError as error:
            response = _fail(context, request, error)
        else:
            response = RedirectResponse("/", status_code=303)
            _start_session(auth, context, request, response, identity)
        response.delete_cookie(cookie, **attributes)
        return response


def _start_session(
    auth: Authenticator, context: ApiContext, request: Request, response: Response, identity: Identity
) -> None:
    auth.start_session(request, response, identity)
    context.store.record_audit(
        actor=str(identity), source=get_request_source(request), action="sign in by OpenID", outcome="done",
        at=time.time(),
    )  # fmt: skip


def _admit(context: ApiContext, name: str, role: str) -> Identity:
    """Returns who comes from the provider, after the store has the name and role."""
    user = context.store.admit_user(name, role, now=time.time())
    if not user.is_active(time.time()):
        raise NotAllowedError(f"{name} was recognised, but is {user.get_state(time.time())} here")
    return Identity(name=user.name, role=user.role)


def _fail(context: ApiContext, request: Request, error: EdgeflError) -> Response:
    """Sends the browser back to the page, which says no more than this; the reason is an event."""
    context.record_rejection("sign-in", get_request_source(request), str(error))
    log.warning("a sign-in by OpenID failed: %s", error)
    return RedirectResponse("/#/sign-in/refused" if isinstance(error, NotAllowedError) else "/#/sign-in/failed", 303)


def _get_callback_url(request: Request) -> str:
    # The provider compares it with what was registered there.
    return f"https://{request.headers.get('host', '')}{CALLBACK_PATH}"


@dataclass(slots=True, kw_only=True)
class _Provider:
    """What the provider says of itself, and until when that is believed."""

    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    has_secret_in_form: bool
    read_s: float


@dataclass(slots=True)
class OpenIdClient:
    """A client of one OpenID provider. Thread-safe.

    Attributes:
        settings: with an issuer and a client id.
        clock: Unix seconds.
        fetch: (method, URL, form or None, (user, password) or None) -> body of the answer; raises `NetworkError`.
    """

    settings: OpenIdSettings
    clock: Callable[[], float] = time.time
    fetch: Callable[..., bytes] = field(default_factory=lambda: fetch_bounded)
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _free: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MAX_CONCURRENT))
    _provider: _Provider | None = None

    @property
    def name(self) -> str:
        """The provider, as the page shows it."""
        return self.settings.name or urlsplit(self.settings.issuer or "").hostname or "OpenID"

    def start(self, callback_url: str) -> tuple[str, str]:
        """Returns where the browser goes, and the secret that it has to come back with.

        Raises:
            NetworkError: the provider cannot be reached, or says nothing usable.
            TooManyTriesError: too many sign-ins at a time.
        """
        from authlib.oauth2.rfc6749.parameters import prepare_grant_uri  # noqa: PLC0415 only with an issuer
        from authlib.oauth2.rfc7636 import create_s256_code_challenge  # noqa: PLC0415 likewise

        secret = f"{int(self.clock())}.{secrets.token_urlsafe(32)}"
        location = prepare_grant_uri(
            self._get_provider().authorization_endpoint,
            self.settings.client_id,
            "code",
            redirect_uri=callback_url,
            scope=self.settings.scope,
            state=self._derive("state", secret),
            nonce=self._derive("nonce", secret),
            code_challenge=create_s256_code_challenge(self._derive("verifier", secret)),
            code_challenge_method="S256",
        )
        return location, secret

    def finish(self, secret: str, *, code: str, state: str, callback_url: str) -> tuple[str, str]:
        """Returns name and role of whoever came back with this code.

        Args:
            secret: from `start`, by the browser's cookie.
            code: of the provider, for one use.
            state: has to be the one that `start` sent.
            callback_url: the same as at the start.

        Raises:
            NotAllowedError: the sign-in was not begun here by this browser, took too long, the provider's answer does
                not count, or nobody gave this person a role.
            NetworkError: the provider cannot be reached.
            TooManyTriesError: too many sign-ins at a time.
        """
        started_at = secret.partition(".")[0]
        if not hmac.compare_digest(state.encode(), self._derive("state", secret).encode()):
            raise NotAllowedError("the sign-in was not begun by this browser, or the coordinator has restarted since")
        if not code or not started_at.isdecimal() or not 0 <= self.clock() - int(started_at) < SIGN_IN_S:
            raise NotAllowedError(f"the provider gave no code, or the sign-in took longer than {SIGN_IN_S:.0f} s")
        provider = self._get_provider()
        form = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": callback_url,
            "client_id": self.settings.client_id, "code_verifier": self._derive("verifier", secret),
        }  # fmt: skip
        password, login = self.settings.client_secret, None
        if password is not None and provider.has_secret_in_form:
            form["client_secret"] = password
        elif password is not None:
            login = (quote(self.settings.client_id, safe=""), quote(password, safe=""))  # RFC 6749, section 2.3.1
        answer = self._ask("POST", provider.token_endpoint, form, login)
        keys = self._ask("GET", provider.jwks_uri)
        nonce = self._derive("nonce", secret)
        return identify(verify_id_token(answer, keys, self.settings, nonce=nonce, now=self.clock()), self.settings)

    def _derive(self, purpose: str, secret: str) -> str:
        digest = hmac.new(self._key, f"{purpose} {secret}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def _get_provider(self) -> _Provider:
        provider = self._provider
        if provider is None or not 0 <= self.clock() - provider.read_s < 3600:
            issuer = self.settings.issuer or ""
            body = self._ask("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            self._provider = provider = parse_provider(body, issuer, now=self.clock())
        return provider

    def _ask(self, method: str, url: str, form: Mapping[str, str] | None = None, login: Any = None) -> bytes:
        if not self._free.acquire(blocking=False):
            raise TooManyTriesError(f"{MAX_CONCURRENT} sign-ins wait for the provider already; try again")
        try:
            return self.fetch(method, url, form, login)
        finally:
            self._free.release()


def fetch_bounded(method: str, url: str, form: Mapping[str, str] | None = None, login: Any = None) -> bytes:
    """Returns the body of an answer 200; follows no redirects.

    Raises:
        NetworkError: no answer within `TIMEOUT_S`, another status, or more than `MAX_ANSWER_BYTES`.
    """
    host, body, deadline_s = urlsplit(url).hostname, bytearray(), time.monotonic() + TIMEOUT_S
    try:
        with (
            httpx.Client(timeout=TIMEOUT_S, headers={"Accept": "application/json"}) as client,
            client.stream(method, url, data=form, auth=login) as response,
        ):
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline_s:
                    raise NetworkError(f"the answer of {host} is too long or too slow")
            if response.status_code != 200:
                raise NetworkError(f"{host} answered {response.status_code} at {urlsplit(url).path[:80]}")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NetworkError(f"{host} cannot be reached: {error}") from None
    return bytes(body)


def parse_provider(body: bytes, issuer: str, *, now: float) -> _Provider:
    """Returns what the provider's configuration says.

    Raises:
        NetworkError: it is malformed, of another issuer, or names an address without TLS.
    """
    value = _parse_object(body, "the provider's configuration")
    if value.get("issuer") != issuer:
        raise NetworkError(f"the provider calls itself {str(value.get('issuer'))[:100]!r}, not {issuer!r}")
    urls: dict[str, Any] = {
        name: value.get(name) for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")
    }
    for name, url in urls.items():
        if not isinstance(url, str) or not is_secure_url(url):
            raise NetworkError(f"the provider's {name} must be a URL with https, got {str(url)[:100]!r}")
    methods = value.get("token_endpoint_auth_methods_supported")
    has_secret_in_form = isinstance(methods, list) and "client_secret_basic" not in methods
    return _Provider(**urls, has_secret_in_form=has_secret_in_form, read_s=now)


def verify_id_token(answer: bytes, keys: bytes, settings: OpenIdSettings, *, nonce: str, now: float) -> Json:
    """Returns the claims of the ID token in the answer of a token endpoint.

    Args:
        answer: JSON with `id_token`.
        keys: the provider's JSON Web Key Set.
        settings: name issuer and client.
        nonce: that the token must have.
        now: Unix seconds.

    Raises:
        NotAllowedError: malformed, or signature, issuer, audience, nonce or time do not fit.
    """
    from authlib.oidc.core.claims import CodeIDToken  # noqa: PLC0415 only with an issuer
    from joserfc.errors import JoseError  # noqa: PLC0415 likewise
    from joserfc.jwk import KeySet  # noqa: PLC0415 likewise
    from joserfc.jws import deserialize_compact  # noqa: PLC0415 likewise

    try:
        value = _parse_object(answer, "the answer")
        key_set: Any = _parse_object(keys, "the key set")
        token = deserialize_compact(
            str(value.get("id_token")), KeySet.import_key_set(key_set), algorithms=list(ALGORITHMS)
        )
        options: Any = {
            "iss": {"essential": True, "value": settings.issuer},
            "aud": {"essential": True, "value": settings.client_id},
        }
        params = {"nonce": nonce, "client_id": settings.client_id, "access_token": value.get("access_token")}
        claims = CodeIDToken(
            _parse_object(token.payload, "the token"), token.headers(), options=options, params=params
        )
        claims.validate(now=int(now), leeway=CLOCK_LEEWAY_S)
    except (JoseError, NetworkError, RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotAllowedError(f"the provider's ID token does not count: {type(error).__name__}: {error}") from None
    return dict(claims)


def identify(claims: Mapping[str, Any], settings: OpenIdSettings) -> tuple[str, str]:
    """Returns name and role of the person whom verified claims describe.

    The name is the e-mail address if the provider has verified it, else `openid-` and a hash of issuer and subject.

    Raises:
        NotAllowedError: neither the address nor a value of the claim has a role.
    """
    email = claims.get("email") if claims.get("email_verified") is True else None
    try:
        email = check_user_name(email) if isinstance(email, str) and "@" in email else None
    except UsageError:
        email = None
    values = claims.get(settings.claim, [])
    values = {each for each in (values if isinstance(values, list) else [values]) if isinstance(each, str)}
    held = {each for each in values if "@" not in each} | ({email} if email else set())
    subject = hashlib.sha256(f"{settings.issuer} {claims.get('sub')}".encode()).hexdigest()[:16]
    name = email or f"openid-{subject}"
    for role, listed in zip(
        reversed(USER_ROLES), (settings.admins, settings.operators, settings.viewers), strict=True
    ):
        if held & {each.lower() if "@" in each else each for each in listed}:
            return name, role
    raise NotAllowedError(f"{name} has no role here; [openid] in settings.toml names who has")


def _parse_object(body: bytes, what: str) -> Json:
    try:
        value = parse_message(body)
    except ValueError as error:
        raise NetworkError(f"{what} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise NetworkError(f"{what} is no JSON object")
    return value
