"""Signatures of devices' requests: what they cover, how long they are valid, and that each is accepted once."""

from __future__ import annotations

import base64
import datetime as dt
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from starlette.requests import Request

from edgefl.core.errors import NotAllowedError
from edgefl.core.protocol import (
    KEY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    make_signed_request,
    parse_nonce,
)

MAX_AGE_S, MAX_AHEAD_S = 305.0, 5.0
"""How far from now a signature may be in the past and in the future when its headers arrive."""
MAX_SIGNERS = 8
"""Maximum number of a device's signers whose nonces are kept: its agent and a few commands have one each."""
MAX_REORDERED = 256
"""How many newer requests of its signer may arrive before a request; older ones are refused."""
MAX_CACHED_KEYS = 4096
"""Maximum number of cached parsed public keys: parsing costs a third of a verification."""


def get_public_key(request: Request) -> bytes:
    """Returns the key that a request names.

    Raises:
        KeyError, ValueError: it names none, or one that is no base64.
    """
    return base64.b64decode(request.headers[KEY_HEADER], validate=True)


def verify_request(request: Request, key: bytes, *, now_s: float) -> tuple[str, float]:
    """Returns nonce and time (Unix seconds) of a request whose headers are signed with this key.

    The body may still be on its way: its hash is covered by the signature, and compared by whoever reads it.

    Raises:
        NotAllowedError: the signature is wrong, or too old.
        KeyError, ValueError, TypeError: a header is missing or malformed.
    """
    headers, scope = request.headers, request.scope
    age_s = _compute_age(request, now_s)
    path = bytes(scope.get("raw_path") or scope["path"].encode())
    target = b"?".join(part for part in (path, scope["query_string"]) if part).decode("ascii")
    _verify(request, key, make_signed_request(request.method, target, headers))
    return headers[NONCE_HEADER], now_s - age_s


def verify_timestamp(request: Request, key: bytes, *, now_s: float) -> None:
    """Checks a request of a stock SuperNode, which signs its time alone, with this key.

    Raises:
        NotAllowedError: the signature is wrong, or too old.
        KeyError, ValueError, TypeError: a header is missing or malformed.
    """
    _compute_age(request, now_s)
    _verify(request, key, request.headers[TIMESTAMP_HEADER].encode("ascii"))


def _compute_age(request: Request, now_s: float) -> float:
    """Returns how many seconds ago a request was signed."""
    signed_at = dt.datetime.fromisoformat(request.headers[TIMESTAMP_HEADER])
    age_s = (dt.datetime.fromtimestamp(now_s, dt.UTC) - signed_at).total_seconds()
    if not -MAX_AHEAD_S < age_s < MAX_AGE_S:
        raise NotAllowedError("its signature is of another time")
    return age_s


def _verify(request: Request, key: bytes, content: bytes) -> None:
    signature = base64.b64decode(request.headers[SIGNATURE_HEADER], validate=True)
    try:
        _parse_public_key(key).verify(signature, content, ECDSA(SHA256()))
    except InvalidSignature:
        raise NotAllowedError("its key or its signature does not count") from None


@lru_cache(maxsize=MAX_CACHED_KEYS)
def _parse_public_key(key: bytes) -> EllipticCurvePublicKey:
    public_key = load_pem_public_key(key)
    if not isinstance(public_key, EllipticCurvePublicKey):
        raise TypeError("no key of an elliptic curve")
    return public_key


@dataclass(slots=True)
class _SignerWindow:
    """Requests of one signer: the highest number, and a bit for each of the `MAX_REORDERED` up to it."""

    highest: int
    seen: int = 1
    newest_s: float = 0.0

    def add(self, number: int) -> bool:
        """Returns whether the number is new, and adds it."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = (self.seen << min(ahead, MAX_REORDERED) | 1) & ((1 << MAX_REORDERED) - 1)
            self.highest = number
            return True
        if -ahead >= MAX_REORDERED or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


@dataclass(slots=True)
class _DeviceNonces:
    floor_s: float
    """Signatures of unknown signers up to this time are refused: their nonces may be forgotten ones."""
    newest_s: float = 0.0
    signers: OrderedDict[str, _SignerWindow] = field(default_factory=OrderedDict)


class NonceMemory:
    """Nonces of the requests that a device may repeat within the lifetime of a signature. Thread-safe.

    Of every signer the highest number is kept, and which of those before it have come, as IPsec does (RFC 4303,
    section 3.4.3). So a device needs some 2 KB at most, however often it asks. What is forgotten (a signer beyond
    `MAX_SIGNERS`, or what an earlier process of this coordinator accepted) is refused by its time.

    Args:
        started_s: Unix seconds; unknown signers' signatures up to then are refused, unless the clock was set back.
    """

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._devices: OrderedDict[Any, _DeviceNonces] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._devices)

    def add(self, device: Any, nonce: str, *, signed_s: float, now_s: float) -> None:
        """Adds the nonce of a verified request.

        Args:
            device: any name of the device.
            nonce: of `NONCE_HEADER`.
            signed_s: Unix seconds of the signature.
            now_s: Unix seconds.

        Raises:
            NotAllowedError: it was used before, or may have been.
            ValueError: the nonce is malformed.
        """
        signer, number = parse_nonce(nonce)
        with self._lock:
            self._remove_expired(now_s)
            kept = self._devices.setdefault(device, _DeviceNonces(self._started_s))
            self._devices.move_to_end(device)
            window = kept.signers.get(signer)
            if window is None:
                if signed_s <= kept.floor_s <= now_s:
                    raise NotAllowedError("its signature is older than what is known of this device's requests")
                window = kept.signers[signer] = _SignerWindow(number)
            elif not window.add(number):
                raise NotAllowedError("the request came before, and counts once")
            kept.signers.move_to_end(signer)
            window.newest_s, kept.newest_s = max(window.newest_s, signed_s), max(kept.newest_s, signed_s)
            while len(kept.signers) > MAX_SIGNERS:
                _, forgotten = kept.signers.popitem(last=False)
                kept.floor_s = max(kept.floor_s, forgotten.newest_s)

    def _remove_expired(self, now_s: float) -> None:
        """Removes devices whose signatures are all too old by now."""
        while self._devices and next(iter(self._devices.values())).newest_s < now_s - MAX_AGE_S:
            self._devices.popitem(last=False)
