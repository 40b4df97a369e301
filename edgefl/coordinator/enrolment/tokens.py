"""Join tokens of boards and access tokens of people: made here, shown once; the store has only their hashes."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Sequence
from shlex import quote

from edgefl.coordinator.directory import CoordinatorDirectory, hash_token
from edgefl.core.errors import UsageError
from edgefl.core.protocol import JOIN_TOKEN_VARIABLE, JoinToken, certificate_fingerprint, validate_slug
from edgefl.storage.repositories.records import UserRecord
from edgefl.storage.store import Store

DEFAULT_TTL = "24h"
UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
MAX_TTL_S = 10 * 365 * 86400.0
MAX_USES = 1_000_000
ROLES = ("trainer", "evaluator")
USER_ROLES = ("viewer", "operator", "admin")
"""Roles of people; each may do what those before it may."""
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,189}\Z")
_TTL = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])\Z")


def parse_ttl(text: str) -> float:
    """Returns the seconds in `90s`, `30m`, `24h`, `7d` or `2w`.

    Raises:
        UsageError: it is malformed, zero, or more than ten years.
    """
    match = _TTL.match(text.strip().lower())
    seconds = float(match[1]) * UNIT_S[match[2]] if match else 0.0
    if not 0 < seconds <= MAX_TTL_S:
        raise UsageError(f"a lifetime must be a number with s, m, h, d or w, from 1s to 3650d, got {text!r}")
    return seconds


def make_token(  # noqa: PLR0913 the terms of a token, by name
    store: Store,
    directory: CoordinatorDirectory,
    *,
    now: float,
    ttl_s: float = 86400.0,
    uses: int = 1,
    groups: Sequence[str] = (),
    role: str = "trainer",
) -> JoinToken:
    """Returns a new token for the fleet of `directory`, after the store has its hash.

    Lifetime, number of uses, groups and role are the operator's: the device has no say in them.

    Raises:
        UsageError: one of them is out of range or unknown.
    """
    if not 1 <= uses <= MAX_USES:
        raise UsageError(f"uses must be from 1 to {MAX_USES}, got {uses}")
    if role not in ROLES:
        raise UsageError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    token = JoinToken(
        ca_fingerprint=directory.compute_ca_fingerprint(),
        token_id=secrets.token_hex(4),
        secret=secrets.token_urlsafe(24),
        fleet=directory.fleet,
        addresses=directory.addresses,
    )
    store.add_token(
        token_id=token.token_id,
        secret_sha256=hash_token(token.secret),
        expires_at=now + ttl_s,
        uses=uses,
        groups=[validate_slug(group, "group") for group in groups],
        role=role,
        created_at=now,
    )
    return token


def format_setup_command(token: JoinToken, directory: CoordinatorDirectory) -> str | None:
    """Returns the line that installs edgefl on a board and lets it join, None where boards cannot download it here.

    curl knows the coordinator by the hash of its public key; the token is in the environment, as for a join.
    """
    if not (directory.setup_script.is_file() and directory.setup_payload.is_file()):
        return None
    url = f"https://{token.addresses[0]}"
    key = bytes.fromhex(certificate_fingerprint(directory.server_cert.read_bytes()))
    pin = f"sha256//{base64.b64encode(key).decode()}"
    fetch = f"curl -fsSk --pinnedpubkey {pin} {quote(url + '/edgefl/v1/setup/setup.sh')}"
    run = f"sudo --preserve-env={JOIN_TOKEN_VARIABLE} sh -s -- {quote(url)} {pin}"
    return f"export {JOIN_TOKEN_VARIABLE}={token.text()}; {fetch} | {run} TASK=PATH"


def make_user(store: Store, name: str, role: str, *, ttl_s: float | None, now: float) -> str:
    """Returns the access token of a new user, after the store has its hash.

    Args:
        store: has the users.
        name: a slug, or an e-mail address.
        role: one of `USER_ROLES`.
        ttl_s: until it expires; None for never.
        now: Unix seconds.

    Raises:
        UsageError: the name or the role is invalid.
        NameTakenError: somebody who may do something has this name.
    """
    if role not in USER_ROLES:
        raise UsageError(f"role must be one of {', '.join(USER_ROLES)}, got {role!r}")
    token = secrets.token_urlsafe(32)
    expires_at = None if ttl_s is None else now + ttl_s
    user = UserRecord(name=check_user_name(name), role=role, created_at=now, expires_at=expires_at)
    store.add_user(user, token_sha256=hash_token(token), now=now)
    return token


def check_user_name(text: str) -> str:
    """Returns the name of a user if it is valid; an e-mail address in lower case.

    Raises:
        UsageError: it is neither a slug nor an e-mail address.
    """
    if "@" not in text:
        return validate_slug(text, "user name")
    if not _EMAIL.match(text):
        raise UsageError(f"user name must be a slug or an e-mail address, got {text[:80]!r}")
    return text.lower()


def format_join_command(token: JoinToken, *, shard: str = "TASK=PATH") -> str:
    """Returns the command with which a device joins; the token is in the environment, where `ps` does not show it."""
    return f"{JOIN_TOKEN_VARIABLE}={token.text()} edgefl device join {token.addresses[0]} --shard {shard}"
