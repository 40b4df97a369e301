"""Who may sign what boards run: Ed25519 keys, and the folder of public ones that a board trusts.

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

from edgefl.bundles.archive import Bundle
from edgefl.errors import BundleError, ConfigError
from edgefl.files import make_private_directory, open_whole, write_whole

PREFIX = b"edgefl bundle v1\n"
"""Goes before what is signed, so that a signature made for something else is none here."""
SIGNERS = Path("/etc/edgefl/signers")
PRIVATE_NAME, PUBLIC_NAME = "signing.pem", "signing.pub.pem"
MAX_KEY_BYTES = 16 * 1024
ID_DIGITS = 16


def key_id(key: Ed25519PublicKey) -> str:
    """Returns the name of a key: the beginning of the SHA-256 of its public half."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:ID_DIGITS]


def make_key(folder: Path, passphrase: str | None) -> str:
    """Makes a key pair in `folder` and returns its id.

    Raises:
        ConfigError: there is one already; it would be lost.
    """
    private, public = folder / PRIVATE_NAME, folder / PUBLIC_NAME
    if private.exists():
        raise ConfigError(f"{private} is there already; whoever needs another key makes it in another folder")
    make_private_directory(folder)
    key = Ed25519PrivateKey.generate()
    lock = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    write_whole(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
    with open_whole(public, mode=0o644) as file:
        file.write(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return key_id(key.public_key())


def is_encrypted(path: Path) -> bool:
    """Returns whether a private key asks for a passphrase."""
    return b"ENCRYPTED" in _content(path)


def load_private(path: Path, passphrase: str | None = None) -> Ed25519PrivateKey:
    """Returns a private key.

    Raises:
        ConfigError: there is none, it is of another kind, or the passphrase is wrong.
    """
    try:
        key = load_pem_private_key(_content(path), passphrase.encode() if passphrase else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} cannot be opened: {error}; is the passphrase right?") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key; make one: edgefl signing init")
    return key


def load_public(path: Path) -> Ed25519PublicKey:
    """Returns a public key; raises `ConfigError` when there is none."""
    try:
        key = load_pem_public_key(_content(path))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key in PEM: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} is no Ed25519 key; bundles are signed with those alone")
    return key


def sign(key: Ed25519PrivateKey, text: bytes) -> bytes:
    return key.sign(PREFIX + text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signers:
    """The keys that a board trusts, by id."""

    folder: Path
    keys: Mapping[str, Ed25519PublicKey]

    @classmethod
    def load(cls, folder: Path = SIGNERS) -> Signers:
        """Returns the keys in a folder; none when it is missing.

        Raises:
            BundleError: somebody else than root and this user could change them.
            ConfigError: a file is no public key.
        """
        files = sorted(folder.glob("*.pem")) if folder.is_dir() else []
        for path in (folder.parent, folder, *files) if files else ():
            check_owner(path)
        loaded = [load_public(path) for path in files]
        return cls(folder=folder, keys={key_id(key): key for key in loaded})

    @classmethod
    def own(cls, folder: Path) -> Signers:
        """Returns the public key of the pair in a folder as the only one; none when there is no pair."""
        path = folder / PUBLIC_NAME
        key = load_public(path) if path.exists() else None
        return cls(folder=folder, keys={key_id(key): key} if key is not None else {})

    def verify(self, bundle: Bundle) -> str:
        """Returns the id of the key that signed a bundle.

        Raises:
            BundleError: no key that is trusted here did.
        """
        if not self.keys:
            raise BundleError(
                f"this board trusts no signer, so it takes no code: {self.folder} holds no key; put one there by "
                "hand: edgefl device trust KEY.pem"
            )
        named = bundle.manifest.key
        key = self.keys.get(named)
        if key is None:
            raise BundleError(
                f"it is signed by key {named[:40]}, which this board does not trust; it trusts {', '.join(self.keys)}"
            )
        try:
            key.verify(bundle.signature, PREFIX + bundle.text)
        except InvalidSignature:
            raise BundleError(f"its signature by key {named} is wrong: it was changed after it was signed") from None
        return named


def check_owner(path: Path) -> None:
    """Raises `BundleError` when another user could change a path: then its keys say nothing."""
    found = path.stat()
    if found.st_uid not in {0, os.geteuid()} or stat.S_IMODE(found.st_mode) & 0o022:
        raise BundleError(
            f"{path} could be changed by others (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}), so its "
            f"keys are worth nothing: sudo chown -R root: {path} && sudo chmod -R go-w {path}"
        )


def _content(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(MAX_KEY_BYTES)
    raise ConfigError(f"{path} is missing; make a key: edgefl signing init")
