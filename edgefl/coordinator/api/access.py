"""Access of people to the HTTPS API: who calls, with which role, by token or session; and the audit trail.

A viewer reads. An operator also runs and deploys. An admin also makes join tokens and users, removes devices and
renews certificates. Commands send an access token with each request, as `Authorization: Bearer`. The page shows its
token or its OpenID sign-in once, and gets a session: a cookie that no script reads and no other site's request
carries. A change by session must also carry the session's CSRF token and come from the page's own origin.

Whoever has a token of `settings.toml` or a row of `users` counts; the row is read at each request, so that a revoked
or expired user is refused at once.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from anyio import to_thread
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl.coordinator.auth import (
    MAX_PATH_CHARS,
    RateLimiter,
    RecordRejection,
    get_request_source,
    ignore_rejection,
    is_loopback,
)
from edgefl.coordinator.directory import CoordinatorDirectory, hash_token
from edgefl.coordinator.enrolment.tokens import USER_ROLES
from edgefl.core.errors import EdgeflError, NotAllowedError, RoleError, StoreError
from edgefl.core.safe_text import escape_text
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

API_PREFIX = "/edgefl/v1/"
MAX_TOKEN_CHARS = 200
ACTOR_HASH_CHARS = 8
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 256
MAX_SESSIONS_PER_USER = 8
CSRF_HEADER = "x-edgefl-csrf"
_READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SCOPE_KEY = "edgefl.access"
AUDIT_DETAIL_KEY = "audit_detail"
"""Name in a request's state: what the audit trail has after the path of an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A person who calls: `name` is for the audit trail, `role` one of `USER_ROLES`."""

    name: str
    role: str

    def has_role(self, role: str) -> bool:
        """Returns whether this person may do what `role` may."""
        return USER_ROLES.index(self.role) >= USER_ROLES.index(role)

    def __str__(self) -> str:
        return f"{self.name} ({self.role})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A signed-in page. `token_sha256` is of the token that it showed, None for a user by OpenID."""

    user: str
    token_sha256: str | None
    csrf_token: str
    started_at: float


@dataclass(slots=True, kw_only=True)
class Sessions:
    """Sessions of pages, in memory alone: a restart ends them. Thread-safe; bounded in number and time.

    Of too many the oldest ends, first of the same user. `clock` gives Unix seconds.
    """

    clock: Callable[[], float] = time.time
    _sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, user: str, token_sha256: str | None = None) -> tuple[str, Session]:
        """Returns the secret of a new session's cookie, and the session."""
        secret = secrets.token_urlsafe(32)
        session = Session(
            user=user, token_sha256=token_sha256, csrf_token=secrets.token_urlsafe(32), started_at=self.clock()
        )
        with self._lock:
            of_user = [key for key, other in self._sessions.items() if other.user == user]
            for key in of_user[: max(0, len(of_user) - MAX_SESSIONS_PER_USER + 1)]:
                del self._sessions[key]
            self._sessions[hash_token(secret)] = session
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return secret, session

    def find(self, secret: str) -> Session | None:
        """Returns the session of a cookie, None if there is none or its time is over."""
        with self._lock:
            session = self._sessions.get(hash_token(secret))
            is_over = session is not None and not 0 <= self.clock() - session.started_at < SESSION_S
            if is_over:
                del self._sessions[hash_token(secret)]
            return None if is_over else session

    def end(self, secret: str) -> None:
        with self._lock:
            self._sessions.pop(hash_token(secret), None)


class Authenticator:
    """Finds out who calls; the methods `require_…` are FastAPI dependencies.

    Args:
        directory: has the hashes of the tokens of `coordinator init`.
        store: has the users.
        listen_host: if it is loopback, every client may read.
        record_rejection: called for wrong and missing tokens.
        clock: Unix seconds.
    """

    def __init__(
        self,
        directory: CoordinatorDirectory,
        store: Store,
        *,
        listen_host: str,
        record_rejection: RecordRejection = ignore_rejection,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._store, self._clock = directory, store, clock
        self.is_open, self._record_rejection = is_loopback(listen_host), record_rejection
        self._rate_limiter = RateLimiter(monotonic=time.monotonic)
        self.sessions = Sessions(clock=clock)
        # Cookies of a host go to all of its ports.
        self._cookie = f"__Host-edgefl-{directory.port}"

    def require_admin(self, request: Request) -> None:
        """Admits only admins.

        Raises:
            NotAllowedError: token or session is missing, wrong or over.
            RoleError: they count, for a role that may not do this.
            TooManyTriesError: too many wrong tokens came from this address.
        """
        self._check(request, "admin")

    def require_operator(self, request: Request) -> None:
        """Admits operators and admins; the errors are those of `require_admin`."""
        self._check(request, "operator")

    def require_viewer(self, request: Request) -> None:
        """Admits all users; the errors are those of `require_admin`."""
        if not self.is_open:
            self._check(request, "viewer")

    def find_identity(self, request: Request) -> Identity | None:
        """Returns who calls, None for nobody who counts; rejects none. Found once for each request."""
        if _SCOPE_KEY not in request.scope:
            request.scope[_SCOPE_KEY] = self._find_identity(request)
        identity: Identity | None = request.scope[_SCOPE_KEY]
        return identity

    def can_act(self, request: Request) -> bool:
        """Returns whether an operator or admin calls; False while the store cannot be read."""
        try:
            identity = self.find_identity(request)
        except StoreError:
            return False
        return identity is not None and identity.has_role("operator")

    def can_still_read(self, request: Request) -> bool:
        """Returns whether the caller may read now, however long ago the request began."""
        return self.is_open or self._find_identity(request) is not None

    def find_actor(self, request: Request) -> str | None:
        """Returns who acts, by name and role; None for nobody who counts, or while the store cannot be read."""
        try:
            identity = self.find_identity(request)
        except StoreError:
            return None
        return None if identity is None else str(identity)

    def find_session(self, request: Request) -> Session | None:
        """Returns the session of the request's cookie."""
        secret = request.cookies.get(self._cookie)
        return None if secret is None else self.sessions.find(secret[:MAX_TOKEN_CHARS])

    def sign_in(self, request: Request, response: Response) -> Identity:
        """Starts a session for the request's bearer token, whose cookie the response gets; returns who it is.

        Raises:
            NotAllowedError: the token counts for nobody.
            TooManyTriesError: too many wrong ones came from this address.
        """
        self._check(request, "viewer")
        identity = self.find_identity(request)
        digest = _token_digest(request)
        if identity is None or digest is None:
            raise NotAllowedError("sign in with an access token")
        self.start_session(request, response, identity, digest)
        return identity

    def start_session(
        self, request: Request, response: Response, identity: Identity, token_sha256: str | None = None
    ) -> None:
        """Starts a session for somebody who was authenticated; replaces the one that the request came with."""
        self._end_session(request)
        secret, _ = self.sessions.start(identity.name, token_sha256)
        response.set_cookie(
            self._cookie, secret, max_age=int(SESSION_S), path="/", secure=True, httponly=True, samesite="strict"
        )

    def end_session(self, request: Request, response: Response) -> None:
        """Ends the session that the request came with, if any, and takes its cookie back."""
        self._end_session(request)
        response.delete_cookie(self._cookie, path="/", secure=True, httponly=True, samesite="strict")

    def _end_session(self, request: Request) -> None:
        self.sessions.end(request.cookies.get(self._cookie, "")[:MAX_TOKEN_CHARS])

    @contextlib.contextmanager
    def limit_failures(self, request: Request) -> Iterator[None]:
        """Counts an `EdgeflError` in the block as a wrong try of the request's address.

        Raises:
            TooManyTriesError: too many wrong ones came from there; the block does not run.
        """
        address = get_request_source(request)
        self._rate_limiter.check(address)
        try:
            yield
        except EdgeflError:
            self._rate_limiter.record_failure(address)
            raise

    def _find_identity(self, request: Request) -> Identity | None:
        digest = _token_digest(request)
        if digest is not None:
            return self._find_token_holder(digest)
        session = self.find_session(request)
        if session is None or (request.method not in _READ_METHODS and not _is_from_page(request, session)):
            return None
        if session.token_sha256 is not None:
            return self._find_token_holder(session.token_sha256)
        user = self._store.find_user(name=session.user)
        # A name that was revoked and given anew is another user.
        if user is None or not user.is_active(self._clock()) or user.created_at > session.started_at:
            return None
        return Identity(name=user.name, role=user.role)

    def _find_token_holder(self, digest: str) -> Identity | None:
        for role, known in (("admin", self._directory.operator_sha256), ("viewer", self._directory.viewer_sha256)):
            # All are compared, whichever matches, so that the time reveals nothing.
            if sum(hmac.compare_digest(digest, other) for other in known):
                return Identity(name=f"init {digest[:ACTOR_HASH_CHARS]}", role=role)
        user = self._store.find_user(token_sha256=digest)
        if user is None or not user.is_active(self._clock()):
            return None
        return Identity(name=user.name, role=user.role)

    def _check(self, request: Request, role: str) -> None:
        identity = self.find_identity(request)
        if identity is not None and identity.has_role(role):
            return
        address, path = get_request_source(request), request.url.path[:MAX_PATH_CHARS]
        required = f"the role {role}" if role == USER_ROLES[-1] else f"the role {role} or a higher one"
        if identity is not None:  # no guess
            self._record_rejection("access token", address, f"{path}: {identity} came; this needs {required}")
            raise RoleError(f"this needs {required}; {identity.name} has the role {identity.role}")
        digest, session = _token_digest(request), self.find_session(request)
        if digest is None and session is not None and not _is_from_page(request, session):
            self._record_rejection("cross-site request", address, f"{path}: with the session of {session.user}")
            raise NotAllowedError("a change by session needs the page's own origin and its CSRF token")
        if digest is None:
            if request.method not in _READ_METHODS:  # a page before its sign-in requests much that it may not read
                self._record_rejection("action without access token", address, path)
            raise NotAllowedError(
                f"this needs {required}: sign in, or on the coordinator's machine: edgefl coordinator user add"
            )
        user = self._store.find_user(token_sha256=digest)
        if user is not None:  # no guess either
            state = user.get_state(self._clock())
            self._record_rejection("access token", address, f"{path}: that of {user.name}, which is {state}")
            raise NotAllowedError(f"the access token of {user.name} is {state}")
        self._record_rejection("access token", address, f"{path}: a wrong one; this needs {required}")
        self._rate_limiter.check(address)
        self._rate_limiter.record_failure(address)
        log.warning("refused a wrong access token for %s", path)
        raise NotAllowedError(f"the access token is wrong; this needs {required}")


def record_actions(
    app: ASGIApp, store: Store, *, find_actor: Callable[[Request], str | None], clock: Callable[[], float] = time.time
) -> ASGIApp:
    """Returns the application, which records actions in the store before the caller has their answer.

    Actions are requests that change something, of somebody whom `find_actor` names.
    """

    async def record(scope: Scope, receive: Receive, send: Send) -> None:
        is_action = (
            scope["type"] == "http"
            and scope["method"] not in _READ_METHODS
            and str(scope["path"]).startswith(API_PREFIX)
        )
        actor = await to_thread.run_sync(find_actor, Request(scope)) if is_action else None
        if actor is None:
            await app(scope, receive, send)
            return

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await to_thread.run_sync(write, int(message["status"]))
            await send(message)

        def write(status: int) -> None:
            path = escape_text(str(scope["path"]).removeprefix(API_PREFIX))[:MAX_PATH_CHARS]
            detail = scope.get("state", {}).get(AUDIT_DETAIL_KEY, "")
            action, source = f"{scope['method']} {path}{detail}", get_request_source(Request(scope))
            outcome = "done" if status < 400 else f"refused ({status})" if status < 500 else f"failed ({status})"
            try:
                store.record_audit(actor=actor, source=source, action=action, outcome=outcome, at=clock())
            except StoreError as error:
                # The log keeps what a full disk does not.
                log.warning("%s from %s: %s, %s; not in the store: %s", actor, source, action, outcome, error)

        await app(scope, receive, send_recorded)

    return record


def has_own_origin(request: Request) -> bool:
    """Returns whether a browser says that a page of this very coordinator sent the request."""
    return request.headers.get("origin") == f"https://{request.headers.get('host', '')}"


def _is_from_page(request: Request, session: Session) -> bool:
    csrf_token = request.headers.get(CSRF_HEADER, "")
    return has_own_origin(request) and hmac.compare_digest(csrf_token.encode(), session.csrf_token.encode())


def _token_digest(request: Request) -> str | None:
    """Returns the hash of the request's bearer token, if it has one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return hash_token(token[:MAX_TOKEN_CHARS]) if scheme.lower() == "bearer" and token else None
