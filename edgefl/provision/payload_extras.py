"""Optional content of a payload: wheels for sites without internet, a lock, signers' keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from edgefl import DISTRIBUTION
from edgefl.core.errors import ConfigError, NotFoundError, UsageError
from edgefl.provision.payload import LOCK_NAME
from edgefl.provision.sd_card import FileContents

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+!-]{0,199}")
OWN_WHEEL_PREFIX = f"{DISTRIBUTION.replace('-', '_')}-"
"""Prefix of the file name of edgefl's own wheel."""
FOREIGN_WHEEL_PREFIX = "edgefl-"
"""Likewise of another project's wheels, and of edgefl's under its earlier name."""
_OWN_WHEEL_PATH = re.compile(rf"wheels/{OWN_WHEEL_PREFIX}([^-]+)-")
_LOCKED_VERSION = re.compile(rf"^{DISTRIBUTION}==(\S+).*--hash=sha256:", re.MULTILINE)


def list_wheels(folder: Path) -> FileContents:
    """Returns the wheels of a folder by their path in the payload.

    Raises:
        NotFoundError: there is no such folder.
        ConfigError: it does not hold one wheel of edgefl, or also other files than wheels.
    """
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder} with wheels")
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    own_wheels = [path.name for path in paths if path.name.startswith(OWN_WHEEL_PREFIX)]
    if len(own_wheels) != 1:
        raise ConfigError(
            f"{folder} must hold one wheel of {DISTRIBUTION}, has {', '.join(own_wheels) or 'none'}; "
            "make it with: edgefl provision wheels"
        )
    if foreign := [path.name for path in paths if path.name.startswith(FOREIGN_WHEEL_PREFIX)]:
        raise ConfigError(
            f"{folder} holds {', '.join(foreign)}, which is not of {DISTRIBUTION} but of another project; remove it"
        )
    if other_files := [path.name for path in paths if path.suffix != ".whl"]:
        raise ConfigError(
            f"{folder} holds what is no wheel: {', '.join(other_files[:5])}; boards install wheels only"
        )
    return {f"wheels/{_validate_file_name(path.name)}": path for path in paths}


def load_lock(path: Path) -> FileContents:
    """Returns a lock by its path in the payload.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it pins nothing by hash.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"the lock {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the lock {path} is no text; a lock lies in provisioning/locks") from None
    if "--hash=sha256:" not in text:
        raise ConfigError(f"the lock {path} has no hashes; boards install only what it names by SHA-256")
    return {LOCK_NAME: path}


def find_edgefl_version(files: Mapping[str, bytes | Path]) -> str:
    """Returns the version of edgefl in a payload; a payload without edgefl is rejected.

    Devices never fetch edgefl itself from an index: anybody with publishing rights could use its name there.

    Raises:
        UsageError: there is neither edgefl's wheel nor a lock with its hash.
        ConfigError: the wheel's name has no version.
    """
    for name in files:
        if name.startswith(f"wheels/{OWN_WHEEL_PREFIX}"):
            if (match := _OWN_WHEEL_PATH.match(name)) is None:
                raise ConfigError(f"{name} is no wheel of edgefl: its name says no version")
            return match[1]
    lock = files.get(LOCK_NAME)
    if isinstance(lock, Path) and (match := _LOCKED_VERSION.search(lock.read_text(encoding="utf-8"))):
        return match[1]
    raise UsageError(
        "boards take edgefl from a wheel that you bring, since an index could hold another package of this name: "
        "--wheels FOLDER, made with edgefl provision wheels, or for boards with internet with: "
        "python3 -m pip wheel --no-deps -w FOLDER ."
    )


def load_signers(paths: Iterable[Path]) -> FileContents:
    """Returns public keys by their path in the payload: devices run code signed by them.

    Raises:
        NotFoundError: a file cannot be read.
        ConfigError: it is no public Ed25519 key; a private one is refused.
    """
    signers: FileContents = {}
    for path in paths:
        try:
            pem = path.read_bytes()
        except OSError as error:
            raise NotFoundError(f"the signer's key {path} cannot be read: {error.strerror}") from None
        name = f"signers/{_validate_file_name(path.stem)}.pem"
        if name in signers:
            raise ConfigError(f"two signers' keys are called {path.stem}; rename one, boards tell them apart by this")
        signers[name] = _load_public_key(pem, path)
    return signers


def _validate_file_name(name: str) -> str:
    """Returns a file name that is safe on a card, in a manifest and in a shell."""
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(
            f"a file of a payload is called by letters, digits and . _ + - ! alone, got {name!r}; rename it"
        )
    return name


def _load_public_key(pem: bytes, path: Path) -> bytes:
    if b"PRIVATE KEY" in pem:
        raise ConfigError(f"{path} is a private key: it stays on your machine; give the public one")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} is no public Ed25519 key in PEM; edgefl makes one with its signing commands")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
