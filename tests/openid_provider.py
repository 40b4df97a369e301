"""A small OpenID provider over HTTP on this machine, which checks what a real one checks."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet

CLIENT, SECRET = "coordinator", "s3cret/:+%"

Claims = dict[str, Any]


def make_key() -> ECKey:
    return ECKey.generate_key("P-256", {"kid": secrets.token_hex(4), "use": "sig", "alg": "ES256"}, private=True)


@dataclass
class Provider:
    """Signs `person` in without a question. `forge` may change the claims; `sign` makes the ID token of them."""

    person: Claims = field(default_factory=lambda: {"sub": "1", "email": "ada@example.org", "email_verified": True})
    key: ECKey = field(default_factory=make_key)
    callbacks: list[str] = field(default_factory=list)
    forge: Callable[[Claims], Claims] = dict
    sign: Callable[[Claims], str] | None = None
    configuration: Callable[[Claims], Claims] = dict
    token_status: int = 200
    asked: list[str] = field(default_factory=list)
    _codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider._get(self)

            def do_POST(self) -> None:
                provider._give_token(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _get(self, request: http.server.BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        self.asked.append(parts.path)
        if parts.path == "/.well-known/openid-configuration":
            value = {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
            }
            _answer(request, 200, self.configuration(value))
        elif parts.path == "/keys":
            _answer(request, 200, KeySet([self.key]).as_dict(private=False))
        elif parts.path == "/authorize":
            self._authorize(request, {name: values[0] for name, values in parse_qs(parts.query).items()})
        else:
            _answer(request, 404, {})

    def _authorize(self, request: http.server.BaseHTTPRequestHandler, asked: dict[str, str]) -> None:
        is_right = (
            asked["client_id"] == CLIENT
            and asked["response_type"] == "code"
            and asked["code_challenge_method"] == "S256"
            and "openid" in asked["scope"].split()
            and asked["redirect_uri"] in self.callbacks
        )
        if not is_right:
            _answer(request, 400, {"error": "invalid_request"})
            return
        code = secrets.token_urlsafe(16)
        self._codes[code] = asked
        request.send_response(302)
        request.send_header(
            "Location", f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"
        )
        request.end_headers()

    def _give_token(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.asked.append("/token")
        form = {
            n: v[0] for n, v in parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode()).items()
        }
        user, _, password = base64.b64decode(request.headers["Authorization"].split()[1]).decode().partition(":")
        asked = self._codes.pop(form["code"], None)  # a code is good for one use
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        is_right = (
            asked is not None
            and (unquote(user), unquote(password)) == (CLIENT, SECRET)
            and form["grant_type"] == "authorization_code"
            and asked["redirect_uri"] == form["redirect_uri"]
            and asked["code_challenge"] == challenge.decode()
        )
        if asked is None or not is_right or self.token_status != 200:
            _answer(request, self.token_status if is_right else 400, {"error": "invalid_grant"})
            return
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
            **self.person,
        }
        claims = self.forge(claims)
        _answer(request, 200, {"access_token": "a", "token_type": "Bearer", "id_token": self._encode(claims)})

    def _encode(self, claims: Claims) -> str:
        if self.sign is not None:
            return self.sign(claims)
        return jwt.encode({"alg": "ES256", "kid": self.key.kid}, claims, self.key)


def _answer(request: http.server.BaseHTTPRequestHandler, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
