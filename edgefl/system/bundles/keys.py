"""Ed25519 signing keys, and the folder of public keys that a board trusts.

The private key lies on the operator's own machine, encrypted with a passphrase if one is given; no coordinator has
it. The public ones are put on a board when it is provisioned, or there by hand; none is ever taken from the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from edgefl.core.errors import BundleError, ConfigError
from edgefl.system.atomic_files import make_private_directory, open_atomic, write_atomic
from edgefl.system.bundles.archive import Bundle

SIGNATURE_PREFIX = b"edgefl bundle v1\n"
"""Domain separation: prefix of the signed bytes, so that signatures made for other purposes are invalid."""
TRUSTED_KEYS_FOLDER = Path("/etc/edgefl/signers")
PRIVATE_KEY_FILE, PUBLIC_KEY_FILE = "signing.pem", "signing.pub.pem"
MAX_KEY_BYTES = 16 * 1024
KEY_ID_DIGITS = 16


def compute_key_id(key: Ed25519PublicKey) -> str:
    """Returns the id of a key: a prefix of the SHA-256 of its public half."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:KEY_ID_DIGITS]


def create_key_pair(folder: Path, passphrase: str | None) -> str:
    """Creates a key pair in `folder` and returns its id.

    Raises:
        ConfigError: there is one already; it would be lost.
    """
    private, public = folder / PRIVATE_KEY_FILE, folder / PUBLIC_KEY_FILE
    if private.exists():
        raise ConfigError(f"{private} is there already; whoever needs another key makes it in another folder")
    make_private_directory(folder)
    key = Ed25519PrivateKey.generate()
    lock = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    write_atomic(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
    with open_atomic(public, mode=0o644) as file:
        file.write(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return compute_key_id(key.public_key())


def is_encrypted(path: Path) -> bool:
    """Returns whether a private key is encrypted with a passphrase."""
    return b"ENCRYPTED" in _read_key_file(path)


def load_private_key(path: Path, passphrase: str | None = None) -> Ed25519PrivateKey:
    """Returns a private key.

    Raises:
        ConfigError: there is none, it is of another kind, or the passphrase is wrong.
    """
    try:
        key = load_pem_private_key(_read_key_file(path), passphrase.encode() if passphrase else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} cannot be opened: {error}; is the passphrase right?") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key; make one: edgefl signing init")
    return key


def load_public_key(path: Path) -> Ed25519PublicKey:
    """Returns a public key; raises `ConfigError` when there is none."""
    try:
        key = load_pem_public_key(_read_key_file(path))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key in PEM: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} is no Ed25519 key; bundles are signed with those alone")
    return key


def sign_manifest(key: Ed25519PrivateKey, manifest_bytes: bytes) -> bytes:
    return key.sign(SIGNATURE_PREFIX + manifest_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKeys:
    """The keys that a board trusts, by id."""

    folder: Path
    keys: Mapping[str, Ed25519PublicKey]

    @classmethod
    def load(cls, folder: Path = TRUSTED_KEYS_FOLDER) -> TrustedKeys:
        """Returns the keys in a folder; none when it is missing.

        Raises:
            BundleError: users other than root and this one could change them.
            ConfigError: a file is no public key.
        """
        files = sorted(folder.glob("*.pem")) if folder.is_dir() else []
        for path in (folder.parent, folder, *files) if files else ():
            check_write_protection(path)
        loaded = [load_public_key(path) for path in files]
        return cls(folder=folder, keys={compute_key_id(key): key for key in loaded})

    @classmethod
    def from_key_pair(cls, folder: Path) -> TrustedKeys:
        """Returns only the public key of the pair in a folder; empty without a pair."""
        path = folder / PUBLIC_KEY_FILE
        key = load_public_key(path) if path.exists() else None
        return cls(folder=folder, keys={compute_key_id(key): key} if key is not None else {})

    def verify(self, bundle: Bundle) -> str:
        """Returns the id of the key that signed a bundle.

        Raises:
            BundleError: the signer is not trusted, or the signature is wrong.
        """
        if not self.keys:
            raise BundleError(
                f"this board trusts no signer, so it takes no code: {self.folder} holds no key; put one there by "
                "hand: edgefl device trust KEY.pem"
            )
        key_id = bundle.manifest.key
        key = self.keys.get(key_id)
        if key is None:
            raise BundleError(
                f"it is signed by key {key_id[:40]}, which this board does not trust; "
                f"it trusts {', '.join(self.keys)}"
            )
        try:
            key.verify(bundle.signature, SIGNATURE_PREFIX + bundle.manifest_bytes)
        except InvalidSignature:
            raise BundleError(f"its signature by key {key_id} is wrong: it was changed after it was signed") from None
        return key_id


def check_write_protection(path: Path) -> None:
    """Raises `BundleError` when another user could change a path: then its keys prove nothing."""
    info = path.stat()
    if info.st_uid not in {0, os.geteuid()} or stat.S_IMODE(info.st_mode) & 0o022:
        raise BundleError(
            f"{path} could be changed by others (owner {info.st_uid}, mode {stat.S_IMODE(info.st_mode):o}), so its "
            f"keys are worth nothing: sudo chown -R root: {path} && sudo chmod -R go-w {path}"
        )


def _read_key_file(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(MAX_KEY_BYTES)
    raise ConfigError(f"{path} is missing; make a key: edgefl signing init")
