"""Signatures of a manifest, and the list of signers that replaces itself: who may sign, how many must, until when.

A board that trusts version n of the list takes version n + 1 when enough of the signers of n, and of those of n + 1,
have signed it. The lists travel with whatever is signed, so that a board that was off follows them one by one.
Versions, threshold and expiry are those of the role "root" of The Update Framework.

Source: Samuel et al., Survivable Key Compromise in Software Update Systems, CCS 2010.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgefl.core.errors import BundleError
from edgefl.core.safe_parsing import parse_json

MANIFEST_PREFIX, LIST_PREFIX = b"edgefl bundle v1\n", b"edgefl signers v1\n"
"""Domain separation: prefixes of the signed bytes, so that a signature made for one purpose is invalid for others."""
SIGNATURES_FORMAT = LIST_FORMAT = 1
SIGNATURE_BYTES = 64
KEY_ID_DIGITS = 16
MAX_KEYS = 16
MAX_LISTS = 100
"""Lists that travel along: all that there ever were, so that every board can follow."""
MAX_LIST_CHARS = 4096
MAX_SIGNATURES_BYTES = 512 * 1024

KeysById = Mapping[str, Ed25519PublicKey]


def compute_key_id(key: Ed25519PublicKey) -> str:
    """Returns the id of a key: a prefix of the SHA-256 of its public half."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:KEY_ID_DIGITS]


def sign_manifest(key: Ed25519PrivateKey, manifest_bytes: bytes) -> Signatures:
    """Returns the signature of a manifest, by one key and without lists."""
    return Signatures(by_key={compute_key_id(key.public_key()): key.sign(MANIFEST_PREFIX + manifest_bytes)})


def list_valid_signers(keys: KeysById, signatures: Mapping[str, bytes], content: bytes) -> list[str]:
    """Returns the ids of those among `keys` whose signature of the bytes is right, sorted."""
    return sorted(
        key_id for key_id, key in keys.items() if key_id in signatures and _is_valid(key, signatures[key_id], content)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignerList:
    """Who may sign.

    Attributes:
        version: 1 for the first, one more for each that replaces it.
        issued, expires: Unix seconds, by the clock of who made it; nothing counts by a list that has expired.
        threshold: number of its keys that must have signed something.
        keys: by id.
    """

    version: int
    issued: int
    expires: int
    threshold: int
    keys: KeysById

    def encode(self) -> str:
        raw = [key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex() for key in self.keys.values()]
        return json.dumps(
            {
                "v": LIST_FORMAT, "version": self.version, "issued": self.issued, "expires": self.expires,
                "threshold": self.threshold, "keys": raw,
            }
        )  # fmt: skip

    @classmethod
    def decode(cls, text: str) -> Self:
        """Returns the validated list in `text`; raises `BundleError` for a malformed one."""
        try:
            value = _parse_object(text, MAX_LIST_CHARS, LIST_FORMAT)
            raw = [Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)) for key in value["keys"]]
            numbers = {name: require_int(value[name]) for name in ("version", "issued", "expires", "threshold")}
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"its list of signers makes no sense: {error!r:.200}") from None
        keys = {compute_key_id(key): key for key in raw}
        made = cls(keys=keys, **numbers)
        if not 1 <= made.threshold <= len(keys) == len(raw) <= MAX_KEYS or made.version < 1:
            raise BundleError(
                f"a list of signers has a version from 1, 1 to {MAX_KEYS} different keys and a threshold of them, "
                f"got version {made.version}, {len(raw)} keys and threshold {made.threshold}"
            )
        if made.expires <= made.issued:
            raise BundleError(f"list {made.version} of signers expires before it was made")
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedList:
    """The exact text of a list of signers, with signatures by key id."""

    text: str
    by_key: Mapping[str, bytes]
    content: SignerList

    @property
    def signed_bytes(self) -> bytes:
        return LIST_PREFIX + self.text.encode()

    def sign(self, key: Ed25519PrivateKey) -> SignedList:
        """Returns the list with one more signature."""
        added = {compute_key_id(key.public_key()): key.sign(self.signed_bytes)}
        return SignedList(text=self.text, by_key={**self.by_key, **added}, content=self.content)

    def check_signed_by(self, keys: KeysById, threshold: int, whose: str) -> None:
        """Raises `BundleError` unless `threshold` of the keys have signed this list."""
        valid = list_valid_signers(keys, self.by_key, self.signed_bytes)
        if len(valid) < threshold:
            raise BundleError(
                f"list {self.content.version} of signers has {len(valid)} of the {threshold} signatures of {whose} "
                "that it needs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signatures:
    """Signatures of a manifest by key id, and the lists of signers that lead to those keys, oldest first."""

    by_key: Mapping[str, bytes]
    lists: tuple[SignedList, ...] = ()

    def encode(self) -> bytes:
        lists = [{"list": one.text, "signatures": _encode_hex(one.by_key)} for one in self.lists]
        document = {"v": SIGNATURES_FORMAT, "signatures": _encode_hex(self.by_key), "signers": lists}
        return (json.dumps(document, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Returns the validated signatures; raises `BundleError` for malformed ones."""
        try:
            value = _parse_object(content, MAX_SIGNATURES_BYTES, SIGNATURES_FORMAT)
            signatures, lists = _decode_hex(value["signatures"]), value["signers"]
            texts = [(_require_utf8(one["list"]), _decode_hex(one["signatures"])) for one in _check_lists(lists)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"its signatures make no sense: {error!r:.200}") from None
        parsed = [SignedList(text=text, by_key=by_key, content=SignerList.decode(text)) for text, by_key in texts]
        versions = [one.content.version for one in parsed]
        if versions != list(range(min(versions, default=0), min(versions, default=0) + len(versions))):
            raise BundleError(f"its lists of signers must follow each other, got versions {versions}")
        return cls(by_key=signatures, lists=tuple(parsed))


def make_next_list(former: Collection[SignedList], content: SignerList) -> tuple[SignedList, ...]:
    """Returns the lists with one more, which nobody has signed yet; raises `BundleError` for too many."""
    if len(former) >= MAX_LISTS:
        raise BundleError(
            f"{MAX_LISTS} lists of signers follow each other at most: begin anew, and put the first list on every "
            "board by hand"
        )
    text = content.encode()
    return (*former, SignedList(text=text, by_key={}, content=SignerList.decode(text)))


def require_str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {str(value)[:80]!r}")
    return value


def require_int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise TypeError(f"expected a whole number, got {str(value)[:80]!r}")
    return value


def _require_utf8(value: object) -> str:
    text = require_str(value)
    text.encode()  # a lone surrogate cannot have been signed
    return text


def _is_valid(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _parse_object(content: str | bytes, max_length: int, version: int) -> Mapping[str, Any]:
    if len(content) > max_length:
        raise ValueError(f"it has a length of {len(content)}, at most {max_length} is read")
    value = parse_json(content)
    if not isinstance(value, dict) or value.get("v") != version:
        raise ValueError(f"it is not of format {version}; it was made by another edgefl")
    return value


def _check_lists(lists: Any) -> list[Any]:
    if not isinstance(lists, list) or len(lists) > MAX_LISTS:
        raise ValueError(f"at most {MAX_LISTS} lists of signers are read")
    return lists


def _encode_hex(by_key: Mapping[str, bytes]) -> dict[str, str]:
    return {key_id: signature.hex() for key_id, signature in by_key.items()}


def _decode_hex(value: Mapping[str, Any]) -> dict[str, bytes]:
    if len(value) > 2 * MAX_KEYS:
        raise ValueError(f"{len(value)} signatures, at most {2 * MAX_KEYS} are read")
    signatures = {str(key_id)[:KEY_ID_DIGITS]: bytes.fromhex(require_str(text)) for key_id, text in value.items()}
    if any(len(signature) != SIGNATURE_BYTES for signature in signatures.values()):
        raise ValueError(f"a signature has {SIGNATURE_BYTES} bytes")
    return signatures
