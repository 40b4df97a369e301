"""What a device keeps on disk: key, certificate, CA, what the join said, shards, the session counter.

Every file is, at any instant, the old one or the new one; the directory is private. `device.json` is written last at
a join: without it the directory belongs to no fleet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, NotJoinedError, StoreError
from edgefl.files import forget_halves, make_private_directory, write_whole
from edgefl.protocol import PEER_PORT, host_and_port
from edgefl.untrusted import parse_json

log = logging.getLogger(__name__)

ROLES = ("trainer", "evaluator")
REFUSED = "refused.json"
"""Lies in the directory of an agent that the coordinator has refused, since it is the copy of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedDevice:
    """Who this device is and where its coordinator is.

    `addresses` are HOST:PORT, best first; `broker_host` None means the host of the address in use; `shards` maps a
    task to a path; `threads` None means all cores; `peer_port` is where it listens for neighbours in a graph;
    above `max_temperature_c` it rests between iterations, None means that it never does.
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

    @property
    def broker_hosts(self) -> tuple[str, ...]:
        """Returns where the broker may be, best first."""
        hosts = [self.broker_host] if self.broker_host else [host_and_port(address)[0] for address in self.addresses]
        return tuple(dict.fromkeys(hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJoin:
    """A key that may already be registered: kept until the answer to the join is on disk."""

    key_pem: bytes = field(repr=False)
    name: str
    ca_fingerprint: str


class DeviceState:
    """The state directory of a device that has joined."""

    def __init__(self, root: Path, device: JoinedDevice) -> None:
        self.root = root
        self.device = device

    @classmethod
    def load(cls, root: Path | None = None) -> DeviceState:
        """Returns the state that a join left in `root` (default: `default_state_dir()`).

        Raises:
            NotJoinedError: no join did.
            ConfigError: `device.json` is damaged.
        """
        root = root or default_state_dir()
        path = root / "device.json"
        try:
            value = parse_json(path.read_text())
        except FileNotFoundError:
            raise NotJoinedError(
                f"{root} belongs to no fleet yet; run: edgefl device join HOST:PORT --token T"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        return cls(root, _device(path, value))

    @property
    def device_id(self) -> str:
        return self.device.device_id

    @property
    def ca(self) -> Path:
        return self.root / "ca.pem"

    @property
    def cert(self) -> Path:
        """The certificate: of the join, or since it was renewed behind the key, so that both change in one write."""
        try:
            is_behind_key = b"BEGIN CERTIFICATE" in self.key.read_bytes()
        except OSError:
            is_behind_key = False
        return self.key if is_behind_key else self.root / "cert.pem"

    @property
    def key(self) -> Path:
        return self.root / "key.pem"

    def refresh(self) -> None:
        """Takes over what others have changed on the disk; raises as `load`."""
        self.device = DeviceState.load(self.root).device

    def change(self, **changes: Any) -> None:
        """Takes over new values of `JoinedDevice` fields, durably; what others changed meanwhile stays."""
        # `device shard add` writes while the agent runs: the file is the truth, not what was loaded once.
        on_disk = DeviceState.load(self.root).device
        self.device = replace(on_disk, **changes)
        if self.device != on_disk:
            write_whole(self.root / "device.json", _dump(self.device))

    def set_shard(self, task: str, path: str) -> None:
        """Remembers where the data for `task` lies."""
        self.change(shards={**DeviceState.load(self.root).device.shards, task: path})

    @property
    def pending_key(self) -> Path:
        """The key of a renewal whose answer is not here yet; the coordinator may know it already."""
        return self.root / ".renewal.pem"

    def take_certificate(self, *, key_pem: bytes, cert_pem: bytes) -> None:
        """Goes on with another certificate and its key; cut off at any instant it has the old pair or the new one."""
        write_whole(self.key, key_pem.rstrip() + b"\n" + cert_pem)
        for former in (self.root / "cert.pem", self.pending_key):
            former.unlink(missing_ok=True)

    def next_session_no(self) -> int:
        """Returns a number larger than every one before, also those before a power cut."""
        path = self.root / "session"
        try:
            last = _counted(path.read_text())
        except FileNotFoundError:
            last = 0
        except ValueError:
            # The coordinator ignores numbers that it has passed, so a lost counter goes on far above.
            last = max(int(time.time()), 1 << 31)
            log.warning("%s is damaged; sessions go on at %d", path, last + 1)
        write_whole(path, b"%d\n" % (last + 1))
        return last + 1

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for one agent; the lock goes when the process does.

        Raises:
            StoreError: another agent runs on this directory.
        """
        with (self.root / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another agent runs on {self.root}; stop it first, or take another --state"
                ) from None
            forget_halves(self.root)
            yield


def default_state_dir() -> Path:
    """Returns `~/.local/share/edgefl/device`, or its place under `XDG_DATA_HOME`."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "edgefl" / "device"


def save_joined(root: Path, device: JoinedDevice, *, key_pem: bytes, cert_pem: bytes, ca_pem: bytes) -> DeviceState:
    """Returns the state after all of it is on disk; cut off before the end, the directory is still not joined."""
    (root / "device.json").unlink(missing_ok=True)  # of a device whose copy this was
    write_whole(root / "key.pem", key_pem)
    write_whole(root / "cert.pem", cert_pem)
    write_whole(root / "ca.pem", ca_pem)
    write_whole(root / "device.json", _dump(device))
    state = DeviceState(root, device)
    for left in (root / REFUSED, state.pending_key):
        left.unlink(missing_ok=True)
    drop_pending(root)
    return state


def save_pending(root: Path, pending: PendingJoin) -> None:
    """Keeps a join's key before it is sent anywhere; makes the directory."""
    make_private_directory(root)
    value = {"key": pending.key_pem.decode(), "name": pending.name, "ca": pending.ca_fingerprint}
    write_whole(root / ".pending", json.dumps(value).encode())


def load_pending(root: Path) -> PendingJoin | None:
    """Returns what an unfinished join left, None when there is nothing of use."""
    try:
        value = parse_json((root / ".pending").read_text())
        return PendingJoin(key_pem=value["key"].encode(), name=str(value["name"]), ca_fingerprint=str(value["ca"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def drop_pending(root: Path) -> None:
    (root / ".pending").unlink(missing_ok=True)


def _counted(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**62:
        raise ValueError(f"no count of sessions: {number}")
    return number


def _dump(device: JoinedDevice) -> bytes:
    return (json.dumps({"v": 1, **asdict(device)}, indent=2) + "\n").encode()


def _device(path: Path, value: object) -> JoinedDevice:
    if not isinstance(value, dict) or value.get("v") != 1:
        raise ConfigError(f"{path} is not of version 1; it was damaged or written by another edgefl")
    known = {f.name for f in fields(JoinedDevice)}
    try:
        device = JoinedDevice(**{k: v for k, v in value.items() if k in known})
    except TypeError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    texts = (device.device_id, device.fleet, device.role, device.accelerator, device.ca_fingerprint)
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"{path} is damaged: device_id, fleet, role, accelerator and ca_fingerprint must be texts, "
            f"got {texts!r:.200}"
        )
    addresses, shards, broker = device.addresses, device.shards, device.broker_host
    if not _are_texts(addresses) or not isinstance(shards, dict) or not _are_texts([*shards.values()]):
        raise ConfigError(f"{path} is damaged: addresses must be a list of texts, shards a table of them")
    if broker is not None and not isinstance(broker, str):
        raise ConfigError(f"{path} is damaged: broker_host must be a text or null, got {broker!r:.40}")
    numbers = {"broker_port": device.broker_port, "peer_port": device.peer_port, "threads": device.threads or 1}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 65536:
            raise ConfigError(f"{path} is damaged: {name} must be a number up to 65535, got {number!r:.40}")
    limit = device.max_temperature_c
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
        raise ConfigError(f"{path} is damaged: max_temperature_c must be a number or null, got {limit!r:.40}")
    return replace(device, addresses=tuple(addresses))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
