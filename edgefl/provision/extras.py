"""What a payload takes along besides the scripts: wheels for sites without internet, a lock, keys of signers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from edgefl import DISTRIBUTION
from edgefl.errors import ConfigError, NotFoundError, UsageError
from edgefl.provision.card import Files
from edgefl.provision.payload import LOCK

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+!-]{0,199}")
OWN_WHEEL = f"{DISTRIBUTION.replace('-', '_')}-"
"""What the file name of edgefl's own wheel begins with."""
FOREIGN_WHEEL = "edgefl-"
"""Likewise of another project's, and of edgefl's before it was called so."""
_WHEEL = re.compile(rf"wheels/{OWN_WHEEL}([^-]+)-")
_LOCKED = re.compile(rf"^{DISTRIBUTION}==(\S+).*--hash=sha256:", re.MULTILINE)


def wheels(folder: Path) -> Files:
    """Returns the wheels of a folder by their place in the payload.

    Raises:
        NotFoundError: there is no such folder.
        ConfigError: it does not hold one wheel of edgefl, or also other files than wheels.
    """
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder} with wheels")
    found = sorted(path for path in folder.iterdir() if path.is_file())
    own = [path.name for path in found if path.name.startswith(OWN_WHEEL)]
    if len(own) != 1:
        raise ConfigError(
            f"{folder} must hold one wheel of {DISTRIBUTION}, has {', '.join(own) or 'none'}; "
            "make it with: edgefl provision wheels"
        )
    if foreign := [path.name for path in found if path.name.startswith(FOREIGN_WHEEL)]:
        raise ConfigError(
            f"{folder} holds {', '.join(foreign)}, which is not of {DISTRIBUTION} but of another project; remove it"
        )
    if strange := [path.name for path in found if path.suffix != ".whl"]:
        raise ConfigError(f"{folder} holds what is no wheel: {', '.join(strange[:5])}; boards install wheels only")
    return {f"wheels/{_plain(path.name)}": path for path in found}


def lock(path: Path) -> Files:
    """Returns a lock by its place in the payload.

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
    return {LOCK: path}


def edgefl_version(files: Mapping[str, bytes | Path]) -> str:
    """Returns the version of edgefl that a payload brings; one that brings none is refused.

    Boards never ask an index for edgefl itself: whoever may publish there could publish under this name.

    Raises:
        UsageError: there is neither edgefl's wheel nor a lock with its hash.
        ConfigError: the wheel's name says no version.
    """
    for name in files:
        if name.startswith(f"wheels/{OWN_WHEEL}"):
            if (found := _WHEEL.match(name)) is None:
                raise ConfigError(f"{name} is no wheel of edgefl: its name says no version")
            return found[1]
    given = files.get(LOCK)
    if isinstance(given, Path) and (found := _LOCKED.search(given.read_text(encoding="utf-8"))):
        return found[1]
    raise UsageError(
        "boards take edgefl from a wheel that you bring, since an index could hold another package of this name: "
        "--wheels FOLDER, made with edgefl provision wheels, or for boards with internet with: "
        "python3 -m pip wheel --no-deps -w FOLDER ."
    )


def signers(paths: Iterable[Path]) -> Files:
    """Returns public keys by their place in the payload: the boards run what these sign.

    Raises:
        NotFoundError: a file cannot be read.
        ConfigError: it is no public Ed25519 key; a private one is refused.
    """
    made: Files = {}
    for path in paths:
        try:
            pem = path.read_bytes()
        except OSError as error:
            raise NotFoundError(f"the signer's key {path} cannot be read: {error.strerror}") from None
        name = f"signers/{_plain(path.stem)}.pem"
        if name in made:
            raise ConfigError(f"two signers' keys are called {path.stem}; rename one, boards tell them apart by this")
        made[name] = _public(pem, path)
    return made


def _plain(name: str) -> str:
    """Returns a file's name that a card, a manifest and a shell take as it is."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"a file of a payload is called by letters, digits and . _ + - ! alone, got {name!r}; rename it"
        )
    return name


def _public(pem: bytes, path: Path) -> bytes:
    if b"PRIVATE KEY" in pem:
        raise ConfigError(f"{path} is a private key: it stays on your machine; give the public one")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} is no public Ed25519 key in PEM; edgefl makes one with its signing commands")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
