"""State directory of a device: key, certificate, CA, settings, shards, session counter, lockout.

Every file is, at any instant, the old one or the new one; the directory is private. `device.json` is written last at
an enrolment: without it the directory belongs to no fleet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgefl.core.analyses import DEFAULT_MIN_GROUP
from edgefl.core.errors import ClonedError, ConfigError, NotJoinedError, StoreBusyError, StoreError
from edgefl.core.protocol import PEER_PORT, host_and_port
from edgefl.core.safe_parsing import parse_json, parse_message
from edgefl.device.hardware.board_reader import read_text
from edgefl.system.atomic_files import (
    ChildPath,
    TlsFiles,
    is_locked,
    lock_file,
    make_private_directory,
    remove_temporary_files,
    write_atomic,
)

log = logging.getLogger(__name__)

ROLES = ("trainer", "evaluator")
CONFINE_POLICIES = ("auto", "always", "never")
"""What runs in a confined process: what is not built in, all training, nothing."""
MAX_MIN_GROUP = 1_000_000
LOCKOUT_FILE = "lockout.json"
"""Marks the directory of an agent that the coordinator has rejected as a clone."""

MAX_REASON_CHARS = 500
KERNEL_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """Settings of an enrolled device.

    `addresses` are HOST:PORT, best first; `broker_host` None means the host of the address in use; `shards` maps a
    task to a path; `threads` None means all cores; `peer_port` is its listening port for neighbours; above
    `max_temperature_c` it pauses between iterations, None means no limit; `confine` is one of `CONFINE_POLICIES`;
    an analysis is about no fewer than `min_group` of its examples; `drift_references` has by task what its newest
    data is compared with, a path or `first`; a task may spend at most `max_epsilon` of its examples' privacy over all
    runs, and then trains in private runs alone; None means no limit; with `only_masked` it trains in runs with
    secure aggregation alone; a base is looked for in the folder `base_source` first, None means none.
    """

    device_id: str
    fleet: str
    role: str
    ca_fingerprint: str
    addresses: tuple[str, ...]
    broker_port: int
    broker_host: str | None = None
    shards: Mapping[str, str] = field(default_factory=dict)
    accelerator: str = "auto"
    threads: int | None = None
    peer_port: int = PEER_PORT
    max_temperature_c: float | None = None
    confine: str = "auto"
    min_group: int = DEFAULT_MIN_GROUP
    drift_references: Mapping[str, str] = field(default_factory=dict)
    max_epsilon: float | None = None
    only_masked: bool = False
    base_source: str | None = None

    @property
    def broker_hosts(self) -> tuple[str, ...]:
        """Returns the candidate hosts of the broker, best first."""
        hosts = [self.broker_host] if self.broker_host else [host_and_port(address)[0] for address in self.addresses]
        return tuple(dict.fromkeys(hosts))

    @property
    def brokers(self) -> list[tuple[str, int]]:
        """Returns hosts and ports of the broker, last reported by the coordinator."""
        return [(host, self.broker_port) for host in self.broker_hosts]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingEnrolment:
    """Key of an unfinished enrolment, possibly registered; kept until the reply is on disk."""

    key_pem: bytes = field(repr=False)
    name: str
    ca_fingerprint: str


class DeviceStateDir:
    """State directory of an enrolled device."""

    ca = ChildPath("ca.pem")
    key = ChildPath("key.pem")
    pending_key = ChildPath(".renewal.pem")
    """The key of an unfinished renewal; it may be registered already."""

    def __init__(self, root: Path, settings: DeviceSettings) -> None:
        self.root = root
        self.settings = settings

    @classmethod
    def load(cls, root: Path | None = None) -> DeviceStateDir:
        """Returns the enrolled state in `root` (default: `get_default_state_dir()`), which is made absolute.

        A confined training process has a working directory of its own.

        Raises:
            NotJoinedError: there is none.
            ConfigError: `device.json` is damaged.
        """
        root = root or get_default_state_dir()
        path = root / "device.json"
        try:
            value = parse_json(path.read_text())
        except FileNotFoundError:
            raise NotJoinedError(
                f"{root} belongs to no fleet yet; run: edgefl device join HOST:PORT --token-file FILE"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        return cls(root.absolute(), _parse_settings(path, value))

    @property
    def device_id(self) -> str:
        return self.settings.device_id

    @property
    def cert(self) -> Path:
        """Returns the certificate's path; after a renewal the key's file, so that both change in one write."""
        try:
            is_behind_key = b"BEGIN CERTIFICATE" in self.key.read_bytes()
        except OSError:
            is_behind_key = False
        return self.key if is_behind_key else self.root / "cert.pem"

    @property
    def tls_files(self) -> TlsFiles:
        return TlsFiles(ca=self.ca, cert=self.cert, key=self.key)

    def reload(self) -> None:
        """Reloads the settings from disk; raises as `load`."""
        self.settings = DeviceStateDir.load(self.root).settings

    def update(self, **changes: Any) -> None:
        """Changes fields of `DeviceSettings` durably; keeps other changes on disk."""
        # `device shard add` writes while the agent runs: the file is authoritative, not the loaded settings.
        on_disk = DeviceStateDir.load(self.root).settings
        self.settings = replace(on_disk, **changes)
        if self.settings != on_disk:
            write_atomic(self.root / "device.json", _encode_settings(self.settings))

    def set_shard(self, task: str, path: str, *, is_only: bool = False) -> None:
        """Sets the path of the data for `task`, and with `is_only` forgets those for all others."""
        others = {} if is_only else DeviceStateDir.load(self.root).settings.shards
        self.update(shards={**others, task: path})

    def remove_shard(self, task: str) -> None:
        """Forgets the path of the data for `task`; the data stays."""
        shards = DeviceStateDir.load(self.root).settings.shards
        self.update(shards={name: path for name, path in shards.items() if name != task})

    def save_certificate(self, *, key_pem: bytes, cert_pem: bytes) -> None:
        """Replaces certificate and key atomically."""
        write_atomic(self.key, key_pem.rstrip() + b"\n" + cert_pem)
        for path in (self.root / "cert.pem", self.pending_key):
            path.unlink(missing_ok=True)

    def next_session_no(self) -> int:
        """Returns a number larger than every one before, even across power cuts."""
        path = self.root / "session"
        try:
            former_no = _parse_session_no(path.read_text())
        except FileNotFoundError:
            former_no = 0
        except ValueError:
            # The coordinator ignores numbers below the last one, so a lost counter continues far above.
            former_no = max(int(time.time()), 1 << 31)
            log.warning("%s is damaged; sessions go on at %d", path, former_no + 1)
        write_atomic(path, b"%d\n" % (former_no + 1))
        return former_no + 1

    @contextlib.contextmanager
    def share_label_page(self, url: str) -> Iterator[None]:
        """Has the agent report the address of a label page while the block and its process last.

        Raises:
            StoreError: it cannot be written, or another page's is reported.
        """
        with lock_file(self.root / "label-page.lock", "another label page of this board is reported"):
            write_atomic(self.root / "label-page", url.encode())
            try:
                yield
            finally:
                (self.root / "label-page").unlink(missing_ok=True)

    def read_label_page(self) -> str | None:
        """Returns the address of the label page that is served now; None where there is none."""
        if not is_locked(self.root / "label-page.lock"):
            return None
        return read_text(self.root / "label-page")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the directory for one agent; the lock ends with the process.

        Raises:
            StoreBusyError: another agent uses this directory.
        """
        with (self.root / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreBusyError(
                    f"another agent runs on {self.root}; stop it first, or take another --state"
                ) from None
            remove_temporary_files(self.root)
            yield


def get_default_state_dir() -> Path:
    """Returns `~/.local/share/edgefl/device`, or its equivalent under `XDG_DATA_HOME`."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "edgefl" / "device"


def save_enrolment(
    root: Path, settings: DeviceSettings, *, key_pem: bytes, cert_pem: bytes, ca_pem: bytes
) -> DeviceStateDir:
    """Writes an enrolment and returns its state; interrupted, the directory is not enrolled."""
    (root / "device.json").unlink(missing_ok=True)  # of the device that this board was a clone of
    write_atomic(root / "key.pem", key_pem)
    write_atomic(root / "cert.pem", cert_pem)
    write_atomic(root / "ca.pem", ca_pem)
    write_atomic(root / "device.json", _encode_settings(settings))
    state = DeviceStateDir(root, settings)
    for path in (root / LOCKOUT_FILE, state.pending_key):
        path.unlink(missing_ok=True)
    delete_pending_enrolment(root)
    return state


def save_pending_enrolment(root: Path, pending: PendingEnrolment) -> None:
    """Stores an enrolment's key before it is sent; creates the directory."""
    make_private_directory(root)
    value = {"key": pending.key_pem.decode(), "name": pending.name, "ca": pending.ca_fingerprint}
    write_atomic(root / ".pending", json.dumps(value).encode())


def load_pending_enrolment(root: Path) -> PendingEnrolment | None:
    """Returns the pending enrolment, or None when there is no usable one."""
    try:
        value = parse_json((root / ".pending").read_text())
        return PendingEnrolment(
            key_pem=value["key"].encode(), name=str(value["name"]), ca_fingerprint=str(value["ca"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def delete_pending_enrolment(root: Path) -> None:
    (root / ".pending").unlink(missing_ok=True)


def _parse_session_no(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**62:
        raise ValueError(f"no count of sessions: {number}")
    return number


def _encode_settings(settings: DeviceSettings) -> bytes:
    return (json.dumps({"v": 1, **asdict(settings)}, indent=2) + "\n").encode()


def _parse_settings(path: Path, value: object) -> DeviceSettings:
    if not isinstance(value, dict) or value.get("v") != 1:
        raise ConfigError(f"{path} is not of version 1; it was damaged or written by another edgefl")
    field_names = {item.name for item in fields(DeviceSettings)}
    try:
        settings = DeviceSettings(**{key: entry for key, entry in value.items() if key in field_names})
    except TypeError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    texts = (settings.device_id, settings.fleet, settings.role, settings.accelerator, settings.ca_fingerprint)
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"{path} is damaged: device_id, fleet, role, accelerator and ca_fingerprint must be texts, "
            f"got {texts!r:.200}"
        )
    addresses, shards, broker = settings.addresses, settings.shards, settings.broker_host
    if not _is_text_list(addresses) or not isinstance(shards, dict) or not _is_text_list([*shards.values()]):
        raise ConfigError(f"{path} is damaged: addresses must be a list of texts, shards a table of them")
    if broker is not None and not isinstance(broker, str):
        raise ConfigError(f"{path} is damaged: broker_host must be a text or null, got {broker!r:.40}")
    numbers = {"broker_port": settings.broker_port, "peer_port": settings.peer_port, "threads": settings.threads or 1}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 65536:
            raise ConfigError(f"{path} is damaged: {name} must be a number up to 65535, got {number!r:.40}")
    references = settings.drift_references
    if not isinstance(references, dict) or not _is_text_list([*references.values()]):
        raise ConfigError(f"{path} is damaged: drift_references must be a table of texts, got {references!r:.80}")
    _check_limits(path, settings)
    if settings.confine not in CONFINE_POLICIES:
        raise ConfigError(
            f"{path} is damaged: confine must be one of {', '.join(CONFINE_POLICIES)}, got {settings.confine!r:.40}"
        )
    return replace(settings, addresses=tuple(addresses))


def _check_limits(path: Path, settings: DeviceSettings) -> None:
    """Raises `ConfigError` where what the board's owner has set is none of it."""
    limit = settings.max_temperature_c
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
        raise ConfigError(f"{path} is damaged: max_temperature_c must be a number or null, got {limit!r:.40}")
    group = settings.min_group
    if isinstance(group, bool) or not isinstance(group, int) or not 1 <= group <= MAX_MIN_GROUP:
        raise ConfigError(f"{path} is damaged: min_group must be 1 to {MAX_MIN_GROUP}, got {group!r:.40}")
    epsilon = settings.max_epsilon
    if epsilon is not None and (
        isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf
    ):
        raise ConfigError(f"{path} is damaged: max_epsilon must be a number above 0 or null, got {epsilon!r:.40}")
    if not isinstance(settings.only_masked, bool):
        raise ConfigError(f"{path} is damaged: only_masked must be true or false, got {settings.only_masked!r:.40}")
    if settings.base_source is not None and not isinstance(settings.base_source, str):
        raise ConfigError(f"{path} is damaged: base_source must be a text or null, got {settings.base_source!r:.40}")


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def save_lockout(root: Path, reason: str, *, kernel_boot_id: Path = KERNEL_BOOT_ID) -> None:
    """Stores in a state directory that the coordinator rejects its agent; ignores a full card."""
    try:
        write_atomic(root / LOCKOUT_FILE, json.dumps({"reason": reason, "boot": read_text(kernel_boot_id)}).encode())
    except StoreError as error:
        log.warning("cannot keep that this agent was refused: %s", error)


def parse_lockout(payload: str, boot_id: str) -> str | None:
    """Returns the reason in a command that rejects the agent of `boot_id`; None if it rejects the clone.

    Raises:
        ValueError: it is malformed.
    """
    try:
        value = parse_message(payload.encode())
        refused, reason = str(value["boot_id"]), str(value["reason"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"a refusal must have boot_id and reason, got {payload[:80]}") from error
    return reason[:MAX_REASON_CHARS] if refused == boot_id else None


def check_not_locked_out(root: Path, *, kernel_boot_id: Path = KERNEL_BOOT_ID) -> None:
    """Raises if the agent of a state directory was rejected since the last boot.

    Raises:
        ClonedError: it was; the message says what to do.
    """
    try:
        lockout = parse_json((root / LOCKOUT_FILE).read_bytes())
        reason, boot_id = str(lockout["reason"]), lockout["boot"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        reason, boot_id = "the note of it is damaged", read_text(kernel_boot_id)
    if boot_id != read_text(kernel_boot_id):
        return
    raise ClonedError(
        f"{reason}; on the copy run `edgefl device join` with a new token and another --name. If this is the right "
        f"one, switch the other off, and this one off and on again or delete {root / LOCKOUT_FILE}"
    )
