"""The payload: one folder `edgefl/` with all files of a device, the same for every way of provisioning.

A Jetson gets it in an overlay: files for its root file system, added before flashing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from edgefl import DISTRIBUTION, __version__
from edgefl.core.errors import ConfigError, NotFoundError, StoreError, UsageError
from edgefl.core.safe_parsing import parse_json
from edgefl.device.enrolment.join_file import get_visible_folder, is_hidden
from edgefl.provision import provisioning_files
from edgefl.provision.provisioning_files import FileContents, count_bytes, read_content
from edgefl.provision.wheels import FOREIGN_WHEEL_PREFIX, OWN_WHEEL_PREFIX, WHEEL_PLATFORMS, get_lock_name
from edgefl.system.atomic_files import make_store_error, open_atomic

SHARD_UNITS = ("edgefl-device.service", "edgefl-join.service")
DROP_IN_NAME = "20-shards.conf"
_UNIT_PATH = re.compile(r"/[\w./+@,=-]+\Z")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+!-]{0,199}")
_OWN_WHEEL_PATH = re.compile(rf"wheels/{OWN_WHEEL_PREFIX}([^-]+)-")
_LOCKED_VERSION = re.compile(rf"^{DISTRIBUTION}==(\S+).*--hash=sha256:", re.MULTILINE)
PAYLOAD_FOLDER = "edgefl"
MANIFEST_NAME = "manifest.json"
SIGNER_LIST = "signers/signers.json"
LOCK_NAME = "requirements.txt"
"""The lock chosen for the device; without one it takes its platform's lock of `locks/`."""
SCRIPTS = ("board/firstboot.sh", "board/install.sh", "board/edgefl-firstboot.service")
SECRET_FILES = frozenset({"join.json"})
"""Files outside the manifest: they are removed after use."""
CARD_PATH = "var/lib/edgefl-card"
FIRSTBOOT_PATH = "var/lib/edgefl-firstboot"
UNITS_PATH = "etc/systemd/system"
FIRSTBOOT_UNIT = "edgefl-firstboot.service"
GPU_DROP_IN = "10-gpu.conf"
# The same files give the same bytes; tar would warn of 1970.
MTIME = 946_684_800


def render_shard_drop_ins(shards: Mapping[str, str]) -> FileContents:
    """Returns drop-ins that bind hidden shards' folders read-only; none where all are visible.

    Raises:
        UsageError: a path on the device is not absolute, or has characters with a meaning in units.
    """
    for task, path in shards.items():
        if not _UNIT_PATH.match(path) or "/../" in f"{path}/":
            raise UsageError(
                f"the shard of {task} must be an absolute path on the board without spaces, got {path!r}; "
                "such as /srv/edgefl/data.npz"
            )
    hidden = sorted({get_visible_folder(path) for path in shards.values() if is_hidden(path)})
    if not hidden:
        return {}
    # A minus: data may come later, and the unit starts without it.
    text = "[Service]\n" + "".join(f"BindReadOnlyPaths=-{path}\n" for path in hidden)
    return {f"units/{unit}.d/{DROP_IN_NAME}": text.encode() for unit in SHARD_UNITS}


def load_extras(wheels: Path | None, lock: Path | None, signers: Iterable[Path]) -> tuple[FileContents, str]:
    """Returns the optional files by their path in the payload, and the version of edgefl that they install.

    Raises:
        NotFoundError, ConfigError: as `list_wheels`, `load_lock` and `load_signers`.
    """
    files: FileContents = {}
    files |= list_wheels(wheels) if wheels else {}
    files |= load_lock(lock) if lock else {}
    version = find_edgefl_version(files)
    return {**files, "version": f"{version}\n".encode(), **load_signers(signers)}, version


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
    """Returns public keys, or a list of signers, by their path in the payload: devices run code signed by them.

    Raises:
        NotFoundError: a file cannot be read.
        ConfigError: it is no public Ed25519 key and no list of signers; a private one is refused.
    """
    signers: FileContents = {}
    for path in paths:
        try:
            pem = path.read_bytes()
        except OSError as error:
            raise NotFoundError(f"the signer's key {path} cannot be read: {error.strerror}") from None
        if path.suffix == ".json":
            signers[SIGNER_LIST] = _check_signer_list(pem, path)
            continue
        name = f"signers/{_validate_file_name(path.stem)}.pem"
        if name in signers:
            raise ConfigError(f"two signers' keys are called {path.stem}; rename one, boards tell them apart by this")
        signers[name] = _load_public_key(pem, path)
    return signers


def _check_signer_list(content: bytes, path: Path) -> bytes:
    """Returns a file of `edgefl signing signers`, whose lists the board itself checks."""
    try:
        value = parse_json(content)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not value.get("signers"):
        raise ConfigError(f"{path} is no list of signers; edgefl signing signers makes one")
    return content


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


def make_payload(join_file: str, extra_files: Mapping[str, bytes | Path] | None = None) -> FileContents:
    """Returns path -> content of all files below `edgefl/`, the manifest included.

    Args:
        join_file: the text of `join.json`.
        extra_files: more files, such as wheels, signers or drop-ins, by their path below the folder.
    """
    files: FileContents = {"join.json": join_file.encode(), **(extra_files or {})}
    if LOCK_NAME not in files:
        files |= _list_platform_locks()
    files.setdefault("version", f"{__version__}\n".encode())
    files |= {Path(name).name: provisioning_files.find_path(name) for name in SCRIPTS}
    files |= {f"units/{unit.name}": unit for unit in sorted(provisioning_files.find_path("units").glob("edgefl-*"))}
    files[MANIFEST_NAME] = render_manifest(
        {name: content for name, content in files.items() if name not in SECRET_FILES}
    )
    return files


def render_manifest(files: Mapping[str, bytes | Path]) -> bytes:
    """Returns the manifest: SHA-256 and size of every file, by its path below the folder."""
    entries = {}
    for name, content in sorted(files.items()):
        body = read_content(content)
        entries[name] = {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    return (json.dumps({"v": 1, "files": entries}, indent=2) + "\n").encode()


def _list_platform_locks() -> FileContents:
    """Returns the lock of every platform, by the machine and CPython that `install.sh` detects."""
    light = {f"{family.machine}-{family.abi}": get_lock_name(family) for family in WHEEL_PLATFORMS.values()}
    return {f"locks/{board}.txt": provisioning_files.find_path(f"locks/{name}") for board, name in light.items()}


def write_overlay(out: Path, payload: Mapping[str, bytes | Path]) -> None:
    """Writes `out`, a tar of mode 0600 to unpack over a root file system, for a join at first boot.

    Everything belongs to root; only root can enter the folder of the token. Folders of the system itself are not in
    it, so that unpacking leaves their modes unchanged.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        with open_atomic(out) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
            for folder in (CARD_PATH, f"{CARD_PATH}/{PAYLOAD_FOLDER}", FIRSTBOOT_PATH):
                add_entry(tar, folder, kind=tarfile.DIRTYPE, mode=0o700)
            folders = {str(parent) for name in payload for parent in Path(name).parents if str(parent) != "."}
            for folder in sorted(folders):
                add_entry(tar, f"{CARD_PATH}/{PAYLOAD_FOLDER}/{folder}", kind=tarfile.DIRTYPE, mode=0o700)
            for name, content in sorted(payload.items()):
                add_entry(tar, f"{CARD_PATH}/{PAYLOAD_FOLDER}/{name}", content, mode=0o600)
            add_entry(
                tar, f"{FIRSTBOOT_PATH}/firstboot.sh", provisioning_files.find_path("board/firstboot.sh"), mode=0o700
            )
            add_entry(tar, f"{FIRSTBOOT_PATH}/source", f"/{CARD_PATH}/{PAYLOAD_FOLDER}\n".encode(), mode=0o600)
            add_entry(
                tar,
                f"{UNITS_PATH}/{FIRSTBOOT_UNIT}",
                provisioning_files.find_path(f"board/{FIRSTBOOT_UNIT}"),
                mode=0o644,
            )
            add_entry(
                tar,
                f"{UNITS_PATH}/multi-user.target.wants/{FIRSTBOOT_UNIT}",
                kind=tarfile.SYMTYPE,
                link=f"/{UNITS_PATH}/{FIRSTBOOT_UNIT}",
            )
            for unit in ("edgefl-device", "edgefl-join"):
                add_entry(
                    tar,
                    f"{UNITS_PATH}/{unit}.service.d/{GPU_DROP_IN}",
                    provisioning_files.find_path(f"units/{GPU_DROP_IN}"),
                    mode=0o644,
                )
    except OSError as error:
        raise make_store_error(out, error) from None
    except tarfile.TarError as error:
        raise StoreError(f"{out} cannot be written: {error}") from None


def write_setup(script: Path, payload: Path, extra_files: Mapping[str, bytes | Path]) -> None:
    """Writes what boards download from a coordinator: the script, and a tar of what it installs.

    Raises:
        StoreError: they cannot be written.
    """
    files = make_payload("", extra_files)
    for name in SECRET_FILES:
        files.pop(name, None)
    files["await.sh"] = provisioning_files.find_path("board/await.sh")
    try:
        with open_atomic(payload) as file:
            write_tar(file, files)
        with open_atomic(script) as file:  # last: without it no line is printed
            file.write(provisioning_files.find_path("board/setup.sh").read_bytes())
    except OSError as error:
        raise make_store_error(payload, error) from None


def write_tar(out: IO[bytes], files: Mapping[str, bytes | Path]) -> None:
    """Writes files into a tar stream; root owns them, and only root reads them."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(files.items()):
            add_entry(tar, name, content, mode=0o600)


def add_entry(
    tar: tarfile.TarFile,
    name: str,
    content: bytes | Path = b"",
    *,
    mode: int = 0o777,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
) -> None:
    """Adds an entry that belongs to root; the same content gives the same bytes."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.mtime, entry.linkname = kind, mode, MTIME, link
    entry.uname = entry.gname = "root"
    if kind == tarfile.REGTYPE:
        entry.size = count_bytes({name: content})
    with contextlib.closing(io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")) as body:
        tar.addfile(entry, body)
