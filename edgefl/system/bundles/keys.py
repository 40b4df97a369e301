"""Ed25519 signing keys, and the folder of public keys that a board trusts.

The private key lies on the operator's own machine, encrypted with a passphrase if one is given; no coordinator has
it. The public ones are put on a board when it is provisioned, or there by hand. From the network comes only a list
of signers that enough of those before it have signed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
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
from edgefl.system.atomic_files import make_private_directory, make_store_error, open_atomic, write_atomic
from edgefl.system.bundles.archive import SignedManifest
from edgefl.system.bundles.signatures import (
    MANIFEST_PREFIX,
    MAX_SIGNATURES_BYTES,
    KeysById,
    Signatures,
    SignedList,
    SignerList,
    compute_key_id,
    list_valid_signers,
)

TRUSTED_KEYS_FOLDER = Path("/etc/edgefl/signers")
PRIVATE_KEY_FILE, PUBLIC_KEY_FILE = "signing.pem", "signing.pub.pem"
MAX_KEY_BYTES = 16 * 1024
LIST_FILE = "signers.json"
"""Lists of signers; in the folder of trusted keys, the last one replaces the single keys."""
_MAX_DATE_S = 253_402_300_799

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKeys:
    """The keys that a board trusts, by id.

    Attributes:
        folder: where root puts them.
        keys, threshold: how many of them must have signed.
        lists: of signers, that led to these keys; the last one counts. None where root put single keys there.
    """

    folder: Path
    keys: KeysById
    threshold: int = 1
    lists: tuple[SignedList, ...] = ()

    @property
    def current_list(self) -> SignerList | None:
        return self.lists[-1].content if self.lists else None

    @classmethod
    def load(cls, folder: Path = TRUSTED_KEYS_FOLDER, *followed: Path) -> TrustedKeys:
        """Returns the keys in a folder, none when it is missing, after the lists of signers that were followed since.

        Args:
            folder: of `.pem` files, or with a list of signers, which root trusts and so needs no signature.
            followed: files that `save` wrote. One that does not lead on from the folder is left aside: root has
                changed his mind.

        Raises:
            BundleError: users other than root and this one could change the folder, or its list is malformed.
            ConfigError: a file is no public key.
        """
        names = ("*.pem", LIST_FILE)
        files = sorted(path for name in names for path in folder.glob(name)) if folder.is_dir() else []
        for path in (folder.parent, folder, *files) if files else ():
            check_write_protection(path)
        if folder / LIST_FILE in files:
            trusted = _follow_last(cls(folder=folder, keys={}), load_lists(folder / LIST_FILE))
        else:
            loaded = [load_public_key(path) for path in files]
            trusted = cls(folder=folder, keys={compute_key_id(key): key for key in loaded})
        for path in followed:
            try:
                trusted = trusted.follow(load_lists(path))
            except BundleError as error:
                log.warning("%s is left aside: %s", path, error)
        return trusted

    @classmethod
    def from_key_pair(cls, folder: Path) -> TrustedKeys:
        """Returns the list of signers in an operator's folder, else the public key of its pair; empty without one."""
        lists, path = load_lists(folder / LIST_FILE), folder / PUBLIC_KEY_FILE
        if lists:
            return _follow_last(cls(folder=folder, keys={}), lists)
        key = load_public_key(path) if path.exists() else None
        return cls(folder=folder, keys={compute_key_id(key): key} if key is not None else {})

    def follow(self, lists: Sequence[SignedList]) -> TrustedKeys:
        """Returns what is trusted after the newer ones of the lists, each signed by those before and by its own.

        Raises:
            BundleError: one in between is missing, or not signed by enough of either.
        """
        trusted = self
        for one in lists:
            former, version = trusted.current_list, one.content.version
            known = former.version if former is not None else 0
            if version <= known or not trusted.keys:
                continue
            if version != known + 1:
                raise BundleError(
                    f"it comes with list {version} of signers, this board knows list {known} and needs those "
                    f"between; put the list there by hand: edgefl device trust {LIST_FILE}"
                )
            one.check_signed_by(trusted.keys, trusted.threshold, "those before")
            one.check_signed_by(one.content.keys, one.content.threshold, "its own")
            trusted = _follow_last(trusted, (*trusted.lists, one))
        return trusted

    def save(self, path: Path, former: TrustedKeys) -> None:
        """Writes the lists that were followed, unless they are those of `former`."""
        if self.lists != former.lists:
            write_lists(path, self.lists)

    def verify(self, signed: SignedManifest, now_s: float) -> TrustedKeys:
        """Returns the keys that are trusted from now on, after checking the signatures and the expiry of a manifest.

        Args:
            signed: the manifest; the lists of signers that came with it are followed first.
            now_s: Unix seconds, at least. That the list of signers was made is known to lie in the past.

        Raises:
            BundleError: too few trusted signers, a wrong signature, or it has expired.
        """
        if not self.keys:
            raise BundleError(
                f"this board trusts no signer, so it takes no code: {self.folder} holds no key; put one there by "
                "hand: edgefl device trust KEY.pem"
            )
        trusted = self.follow(signed.signatures.lists)
        trusted.check_signers(signed)
        current = trusted.current_list
        now_s = max(now_s, current.issued if current is not None else 0)
        trusted.check_list_expiry(now_s)
        manifest = signed.manifest
        if now_s >= manifest.expires:
            raise BundleError(
                f"{manifest.name} {manifest.version} could be installed until {_format_day(manifest.expires)}, it is "
                f"{_format_day(now_s)}; sign it anew if it is still right"
            )
        return trusted

    def check_list_expiry(self, now_s: float) -> None:
        """Raises `BundleError` when the list of signers has expired: nobody says any more that it is current."""
        current = self.current_list
        if current is not None and now_s >= current.expires:
            raise BundleError(
                f"list {current.version} of signers expired on {_format_day(current.expires)}, it is "
                f"{_format_day(now_s)}: somebody holds newer ones back, or none was made: edgefl signing signers"
            )

    def check_signers(self, signed: SignedManifest) -> None:
        """Raises `BundleError` unless enough of the trusted keys have signed a manifest, and none of them wrongly."""
        signatures = signed.signatures.by_key
        if not signatures:
            raise BundleError("it is unsigned")
        known = sorted(self.keys.keys() & signatures.keys())
        if not known:
            raise BundleError(
                f"it is signed by key {', '.join(sorted(signatures))[:80]}, which this board does not trust; "
                f"it trusts {', '.join(self.keys)}"
            )
        valid = list_valid_signers(self.keys, signatures, MANIFEST_PREFIX + signed.manifest_bytes)
        if wrong := [key_id for key_id in known if key_id not in valid]:
            raise BundleError(f"its signature by key {wrong[0]} is wrong: it was changed after it was signed")
        if len(valid) < self.threshold:
            raise BundleError(
                f"it is signed by {', '.join(valid)}, and {self.threshold} signers are needed: edgefl signing cosign"
            )


def _follow_last(trusted: TrustedKeys, lists: Sequence[SignedList]) -> TrustedKeys:
    """Returns the keys of the last list; those that are trusted already where there is none."""
    if not lists:
        return trusted
    content = lists[-1].content
    return replace(trusted, keys=content.keys, threshold=content.threshold, lists=tuple(lists))


def load_lists(path: Path) -> tuple[SignedList, ...]:
    """Returns the lists of signers in a file, none without one; raises `BundleError` for a malformed one."""
    try:
        with path.open("rb") as file:
            return Signatures.decode(file.read(MAX_SIGNATURES_BYTES + 1)).lists
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from None


def write_lists(path: Path, lists: tuple[SignedList, ...]) -> None:
    """Writes lists of signers; raises StoreError when the file cannot be written."""
    try:
        with open_atomic(path, mode=0o644) as file:
            file.write(Signatures(by_key={}, lists=lists).encode())
    except OSError as error:
        raise make_store_error(path, error) from None


def _format_day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(min(seconds, _MAX_DATE_S)))


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
