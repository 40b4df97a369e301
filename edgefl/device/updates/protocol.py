"""Files between the agent and the updater: request and bundle, status, health.

The agent is unprivileged and writes below its state directory, the updater is root and writes below the slots; each
reads the other's file and trusts none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from edgefl import __version__
from edgefl.core.errors import BundleError, EdgeflError, StoreError
from edgefl.core.safe_parsing import SHA256, parse_json, parse_record
from edgefl.device.updates.slots import Slots
from edgefl.system.atomic_files import DISK_FULL_ERRNOS, make_store_error, open_atomic, write_atomic
from edgefl.system.bundles.archive import MAX_BUNDLE_FILE_BYTES

log = logging.getLogger(__name__)

STATUS_FILE, STATUS_FORMAT = "status.json", 1
HEALTH_FILE = "health.json"
MAX_HEALTH_BYTES = 16 * 1024
REQUEST_FOLDER, REQUEST_FILE = "updates", "request.json"
BUNDLE_SUFFIX = ".bundle"
MAX_REQUEST_BYTES = 4096
_CHUNK_BYTES = 1 << 20
ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallRequest:
    """Request to install a bundle; `id` is of an installation, or chosen by a user."""

    id: str
    sha256: str


def write_request(state_dir: Path, request: InstallRequest) -> None:
    """Writes a request; the bundle must exist already."""
    content = {"v": 1, "id": request.id, "bundle": request.sha256}
    write_atomic(state_dir / REQUEST_FOLDER / REQUEST_FILE, json.dumps(content).encode())


def read_request(state_dir: Path) -> InstallRequest | None:
    """Returns the agent's request, or None.

    Raises:
        BundleError: it is malformed.
    """
    try:
        with _open_requested(state_dir, REQUEST_FILE) as descriptor:
            content = os.read(descriptor, MAX_REQUEST_BYTES)
        value = parse_json(content)
        request = InstallRequest(id=value["id"], sha256=value["bundle"])
        is_valid = value["v"] == 1 and ID_PATTERN.match(request.id) and SHA256.match(request.sha256)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise BundleError(f"{state_dir / REQUEST_FOLDER / REQUEST_FILE} makes no sense: {error!r}") from None
    if not is_valid:
        raise BundleError(
            f"{state_dir / REQUEST_FOLDER / REQUEST_FILE} makes no sense: it names no installation and no bundle"
        )
    return request


def copy_bundle(state_dir: Path, request: InstallRequest, out: Path) -> None:
    """Copies the bundle of a request to a path that its sender cannot change.

    Raises:
        BundleError: it is missing, no plain file, too large, or not the requested one.
        StoreFullError: no room.
    """
    name, digest, num_bytes = f"{request.sha256}{BUNDLE_SUFFIX}", hashlib.sha256(), 0
    try:
        with _open_requested(state_dir, name) as descriptor, open_atomic(out) as file:
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > MAX_BUNDLE_FILE_BYTES:
                    raise BundleError(f"the bundle has more than {MAX_BUNDLE_FILE_BYTES} bytes")
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != request.sha256:
                raise BundleError(f"{name} has SHA-256 {digest.hexdigest()[:12]}…; it is damaged")
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise make_store_error(out, error) from None
        raise BundleError(
            f"the bundle cannot be taken from {state_dir / REQUEST_FOLDER}: {error.strerror or error}"
        ) from None


@contextlib.contextmanager
def _open_requested(state_dir: Path, name: str) -> Iterator[int]:
    """Yields a descriptor of a plain file in the request folder; neither may be a link."""
    folder = os.open(state_dir / REQUEST_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with _open_plain_file(name, state_dir / REQUEST_FOLDER / name, folder) as descriptor:
            yield descriptor
    finally:
        os.close(folder)


@contextlib.contextmanager
def _open_plain_file(name: str | Path, path: Path, folder: int | None = None) -> Iterator[int]:
    """Yields a descriptor of a file that another user may have put there: no link, pipe or device."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BundleError(f"{path} is no plain file")
        yield descriptor
    finally:
        os.close(descriptor)


class InstallPhase(StrEnum):
    """Phase of an installation: the new slot is built, activated by `current`, in trial, or rolled back."""

    BUILDING = "building"
    ACTIVATING = "flipping"
    TRIAL = "trial"
    ROLLING_BACK = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallAttempt:
    """Installation in progress.

    An agent that starts in the new slot repeats `token`, which excludes older ones; every attempt has a new one.
    """

    id: str
    sha256: str
    step: InstallPhase
    old: str
    new: str
    token: str = ""
    attempts: int = 1
    kind: str = ""
    name: str = ""
    version: str = ""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallResult:
    """Result of a request; `state` is running, refused, failed or rolled-back."""

    id: str
    state: str
    reason: str | None = None
    name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdaterStatus:
    trial: InstallAttempt | None = None
    outcome: InstallResult | None = None


def read_status(slots: Slots) -> UpdaterStatus:
    """Returns the updater's status; empty when it never ran, or the file is damaged."""
    path = slots.work_dir / STATUS_FILE
    try:
        value = parse_json(path.read_bytes())
        trial = parse_record(InstallAttempt, value.get("trial"))
        if trial is not None:
            trial = InstallAttempt(**{**asdict(trial), "step": InstallPhase(trial.step)})
        return UpdaterStatus(trial=trial, outcome=parse_record(InstallResult, value.get("outcome")))
    except FileNotFoundError:
        return UpdaterStatus()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is damaged and left aside: %s", path, error)
        return UpdaterStatus()


def write_status(slots: Slots, status: UpdaterStatus) -> None:
    with open_atomic(slots.work_dir / STATUS_FILE, mode=0o644) as file:
        file.write(json.dumps({"v": STATUS_FORMAT, **asdict(status)}).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHealth:
    """Health of one agent process: version, slot, trial token, and whether it reached the coordinator.

    `linked` is whether it has reached the broker; None for releases without this field.
    """

    boot_id: str
    version: str
    slot: str = ""
    token: str = ""
    connected: bool = False
    linked: bool | None = None
    packs: Mapping[str, str] = field(default_factory=dict)


class HealthWriter:
    """Writer of an agent's health, called by any thread; writes nothing outside of slots."""

    def __init__(self, slots: Slots | None, state_dir: Path, boot_id: str) -> None:
        self._state_dir, self._lock = state_dir, threading.Lock()
        self._health: AgentHealth | None = None
        self._written: AgentHealth | None = None
        try:
            if slots is not None:
                trial, slot = read_status(slots).trial, slots.get_active_slot()
                packs = {name: pack.version for name, pack in slots.load_record(slot).packs.items()}
                token = trial.token if trial is not None else ""
                self._health = AgentHealth(
                    boot_id=boot_id, version=__version__, slot=slot, token=token, linked=False, packs=packs
                )
        except EdgeflError as error:
            log.warning("the updater cannot be told what runs here: %s", error)

    def record(self, *, connected: bool = False, linked: bool = False) -> None:
        """Writes the health if it has changed; `connected` to a compatible coordinator, `linked` to the broker."""
        with self._lock:
            if (health := self._health) is None:
                return
            health = replace(health, connected=health.connected or connected, linked=health.linked or linked)
            if health == self._written:
                return
            self._health = health
            try:
                write_atomic(self._state_dir / HEALTH_FILE, json.dumps({"v": 1, **asdict(health)}).encode())
            except StoreError as error:
                log.warning("the updater cannot be told that this version works: %s", error)
                return
            self._written = health


def read_health(state_dir: Path) -> AgentHealth | None:
    """Returns the agent's last health, None when unusable; its folder is another user's."""
    path = state_dir / HEALTH_FILE
    try:
        with _open_plain_file(path, path) as descriptor:
            value = parse_json(os.read(descriptor, MAX_HEALTH_BYTES))
        return AgentHealth(
            boot_id=str(value["boot_id"]),
            version=str(value["version"]),
            slot=str(value["slot"]),
            token=str(value["token"]),
            connected=value["connected"] is True,
            linked=value["linked"] is True if "linked" in value else None,
            packs={str(name): str(version) for name, version in value["packs"].items()},
        )
    except (OSError, BundleError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
