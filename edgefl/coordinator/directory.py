"""The coordinator's state directory: keys, settings and access tokens; private, and written atomically.

A directory counts as set up when `settings.toml` is there, and that file is written last: a setup that was cut off
is simply made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from edgefl.config import AlertSettings, CertificateSettings, from_mapping
from edgefl.coordinator import pki
from edgefl.coordinator.local_addresses import local_addresses
from edgefl.errors import ConfigError, NotJoinedError, StoreError
from edgefl.files import DATABASE_NAME, forget_halves, make_private_directory, write_whole
from edgefl.protocol import COORDINATOR_NAME, certificate_fingerprint, checked_slug
from edgefl.untrusted import parse_toml

DEFAULT_FLEET = "fleet"
DEFAULT_PORT = 8000
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Settings = TypeVar("Settings", AlertSettings, CertificateSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorDirectory:
    """One coordinator's directory and what its settings say.

    `hosts` are the names and addresses under which devices find the coordinator, best first. Of the access tokens
    only SHA-256 hashes are kept. `store` is the URL of a database server, perhaps with a password; None for SQLite in
    the directory.
    """

    root: Path
    fleet: str
    hosts: tuple[str, ...]
    port: int = DEFAULT_PORT
    operator_sha256: tuple[str, ...] = field(default=(), repr=False)
    viewer_sha256: tuple[str, ...] = field(default=(), repr=False)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    certificates: CertificateSettings = field(default_factory=CertificateSettings)
    store: str | None = field(default=None, repr=False)

    @property
    def settings(self) -> Path:
        return self.root / "settings.toml"

    @property
    def ca_cert(self) -> Path:
        return self.root / "ca.pem"

    @property
    def ca_key(self) -> Path:
        return self.root / "ca.key"

    @property
    def server_cert(self) -> Path:
        return self.root / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.root / "server.key"

    @property
    def client_cert(self) -> Path:
        return self.root / "coordinator.pem"

    @property
    def client_key(self) -> Path:
        return self.root / "coordinator.key"

    @property
    def database(self) -> Path:
        return self.root / DATABASE_NAME

    @property
    def store_url(self) -> str | Path:
        """Where the store is: what `Store.open` takes."""
        return self.store or self.database

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def broker(self) -> Path:
        return self.root / "broker"

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT for every host, best first; IPv6 in brackets."""
        return tuple(f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in self.hosts)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for one running coordinator; the lock goes when the process does.

        Raises:
            StoreError: another coordinator runs on this directory, or it cannot be written.
        """
        otherwise = f"another coordinator runs on {self.root}; stop it first, or take another --dir"
        with _held(self.root / "lock", otherwise):
            forget_halves(self.root)
            yield

    def broker_locked(self) -> contextlib.AbstractContextManager[None]:
        """Holds the directory for one running broker, whether a coordinator has started it or not.

        Raises:
            StoreError: another broker runs on this directory, or it cannot be written.
        """
        return _held(
            self.root / "broker.lock",
            f"a broker runs on {self.root} already; stop it first, or let the coordinator use it: "
            "edgefl coordinator start --broker mqtts://HOST:PORT",
        )

    def authority(self) -> pki.KeyPair:
        """Returns the CA with its key."""
        return pki.KeyPair(key_pem=self.ca_key.read_bytes(), cert_pem=self.ca_cert.read_bytes())

    def ca_fingerprint(self) -> str:
        return certificate_fingerprint(self.ca_cert.read_bytes())


@contextlib.contextmanager
def _held(path: Path, otherwise: str) -> Iterator[None]:
    with contextlib.ExitStack() as closers:
        try:
            file = closers.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(otherwise) from None
        except OSError as error:
            raise StoreError(f"{path} cannot be locked: {error.strerror or error}") from None
        yield


def default_directory() -> Path:
    """Returns `~/.local/share/edgefl/coordinator`, or its place under `XDG_DATA_HOME`."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "edgefl" / "coordinator"


def init_directory(
    root: Path, *, hosts: Sequence[str] = (), fleet: str | None = None, port: int | None = None
) -> CoordinatorDirectory:
    """Returns the directory, set up: CA, server and MQTT certificates, settings, empty folders.

    A directory that is already set up keeps its CA, its devices and its tokens; hosts that are new are added.

    Raises:
        ConfigError: it is set up for another fleet or port, or holds a database without settings.
        UsageError: the fleet's name or a host is none.
    """
    bare = CoordinatorDirectory(root=root, fleet=checked_slug(fleet or DEFAULT_FLEET, "fleet name"), hosts=())
    if bare.settings.exists():
        return _init_again(load_directory(root), hosts, fleet, port)
    if bare.database.exists():
        raise ConfigError(f"{root} holds a database but no settings.toml; restore a backup or take another --dir")
    directory = replace(bare, hosts=_announced(hosts), port=port or DEFAULT_PORT)
    make_private_directory(root)
    authority = pki.create_authority(directory.fleet)
    server = pki.issue_server(authority, _names(directory.hosts))
    client = pki.issue_client(authority, COORDINATOR_NAME, days=directory.certificates.server_days)
    _write_pair(directory.ca_cert, directory.ca_key, authority)
    _write_pair(directory.client_cert, directory.client_key, client)
    _write_pair(directory.server_cert, directory.server_key, server)
    for folder in (directory.models, directory.runs, directory.broker):
        make_private_directory(folder)
    _write_settings(directory)
    return directory


def load_directory(root: Path) -> CoordinatorDirectory:
    """Returns a directory that was set up before.

    Raises:
        NotJoinedError: it was not.
        ConfigError: its settings are damaged, or a key is missing.
    """
    value = _read_settings(root)
    if value is None:
        raise NotJoinedError(f"{root} is no coordinator directory; run: edgefl coordinator init --dir {root}")
    directory = _from_settings(root, value)
    for file in (directory.ca_cert, directory.ca_key, directory.server_cert, directory.server_key):
        if not file.exists():
            raise ConfigError(f"{file} is missing; restore it from a backup of {root}")
    return directory


def store_of(root: Path) -> str | Path:
    """Returns where the store of a coordinator or a simulation in this directory is: what `Store.open` takes.

    Raises:
        ConfigError: the settings there are damaged.
    """
    value = _read_settings(root) or {}
    return str(value["store"]) if "store" in value else root / DATABASE_NAME


def readdress(root: Path, hosts: Sequence[str], *, port: int | None = None) -> CoordinatorDirectory:
    """Returns the directory after it got a new server certificate and address list; the CA stays.

    Devices that joined keep trusting it; the new addresses reach them when they next connect. Without `hosts` the
    names and addresses of this machine are taken.
    """
    directory = load_directory(root)
    changed = replace(directory, hosts=_announced(hosts), port=port or directory.port)
    _issue_server(changed)
    _write_settings(changed)
    return changed


def issue_own(directory: CoordinatorDirectory) -> None:
    """Makes the server's certificate and the coordinator's own one anew, with new keys."""
    days = directory.certificates.server_days
    client = pki.issue_client(directory.authority(), COORDINATOR_NAME, days=days)
    _write_pair(directory.client_cert, directory.client_key, client)
    _issue_server(directory)


def add_access(directory: CoordinatorDirectory) -> tuple[CoordinatorDirectory, str, str]:
    """Returns the directory with one more operator and one more viewer token, and these two as plain text."""
    operator, viewer = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    changed = replace(
        directory,
        operator_sha256=(*directory.operator_sha256, token_hash(operator)),
        viewer_sha256=(*directory.viewer_sha256, token_hash(viewer)),
    )
    _write_settings(changed)
    return changed, operator, viewer


def with_store(directory: CoordinatorDirectory, url: str | None) -> CoordinatorDirectory:
    """Returns the directory with its store at this URL, which its settings remember; None changes nothing.

    What the former store holds stays where it is.

    Raises:
        StoreError: no store can be opened there; the settings are as before.
        MissingPackageError: its database driver is not installed.
    """
    from edgefl.storage.store import Store  # noqa: PLC0415 SQLAlchemy is slow to load

    if url is None or url == directory.store:
        return directory
    Store.open(url).close()
    changed = replace(directory, store=url)
    _write_settings(changed)
    return changed


def token_hash(token: str) -> str:
    """Returns the SHA-256 of a token, as the settings and the store keep it."""
    return hashlib.sha256(token.encode()).hexdigest()


def _init_again(
    directory: CoordinatorDirectory, hosts: Sequence[str], fleet: str | None, port: int | None
) -> CoordinatorDirectory:
    if fleet is not None and fleet != directory.fleet:
        raise ConfigError(f"{directory.root} belongs to fleet {directory.fleet!r}, not {fleet!r}; take another --dir")
    if port is not None and port != directory.port:
        raise ConfigError(
            f"{directory.root} is set up for port {directory.port}, not {port}; "
            f"to change it: edgefl coordinator readdress --port {port}"
        )
    new = [host for host in hosts if host not in directory.hosts]
    if not new:
        return directory
    return readdress(directory.root, [*new, *directory.hosts])


def _issue_server(directory: CoordinatorDirectory) -> None:
    days = directory.certificates.server_days
    server = pki.issue_server(directory.authority(), _names(directory.hosts), days=days)
    _write_pair(directory.server_cert, directory.server_key, server)


def _announced(hosts: Sequence[str]) -> tuple[str, ...]:
    """What tokens carry: what the user named, else this machine's own name and addresses."""
    if hosts:
        return tuple(dict.fromkeys(hosts))
    own = [name for name in [_mdns_name()] if pki.HOST_NAME.match(name)]
    return (*own, *local_addresses()) if local_addresses() else ("127.0.0.1",)


def _names(hosts: Sequence[str]) -> list[str]:
    """What the certificate is good for: more than is announced, since a name more does no harm."""
    own = [name for name in (socket.gethostname().lower(), _mdns_name()) if pki.HOST_NAME.match(name)]
    return list(dict.fromkeys([*hosts, *own, *local_addresses(), *LOOPBACK]))


def _mdns_name() -> str:
    return f"{socket.gethostname().partition('.')[0].lower()}.local"


def _write_pair(cert: Path, key: Path, pair: pki.KeyPair) -> None:
    write_whole(key, pair.key_pem)
    write_whole(cert, pair.cert_pem)


def _write_settings(directory: CoordinatorDirectory) -> None:
    # JSON strings, numbers and lists of strings are TOML too.
    values = {
        "fleet": directory.fleet,
        "hosts": list(directory.hosts),
        "port": directory.port,
        "operator_sha256": list(directory.operator_sha256),
        "viewer_sha256": list(directory.viewer_sha256),
    } | ({} if directory.store is None else {"store": directory.store})
    tables: dict[str, Any] = {"alerts": directory.alerts, "certificates": directory.certificates}
    text = _toml(values) + "".join(
        _table(name, asdict(table), asdict(type(table)())) for name, table in tables.items()
    )
    write_whole(directory.settings, text.encode())


def _table(name: str, values: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Returns a TOML table of what is not as usual, nothing where all is."""
    changed = {key: value for key, value in values.items() if value != usual[key]}
    return f"\n[{name}]\n{_toml(changed)}" if changed else ""


def _toml(values: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def _read_settings(root: Path) -> dict[str, Any] | None:
    path = root / "settings.toml"
    try:
        return parse_toml(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _from_settings(root: Path, value: Mapping[str, Any]) -> CoordinatorDirectory:
    known = {"fleet": str, "hosts": list, "port": int, "operator_sha256": list, "viewer_sha256": list}
    for key, kind in [*known.items(), *([("store", str)] if "store" in value else [])]:
        if not isinstance(value.get(key), kind):
            raise ConfigError(f"{root / 'settings.toml'}: {key} must be a {kind.__name__}, got {value.get(key)!r}")
    if unknown := sorted(set(value) - set(known) - {"store", "alerts", "certificates"}):
        raise ConfigError(f"{root / 'settings.toml'}: unknown key {unknown[0]!r}, known are {', '.join(known)}")
    return CoordinatorDirectory(
        root=root,
        fleet=value["fleet"],
        hosts=tuple(map(str, value["hosts"])),
        port=value["port"],
        operator_sha256=tuple(value["operator_sha256"]),
        viewer_sha256=tuple(value["viewer_sha256"]),
        alerts=_section(root, AlertSettings, value.get("alerts", {}), "alerts"),
        certificates=_section(root, CertificateSettings, value.get("certificates", {}), "certificates"),
        store=value.get("store"),
    )


def _section(root: Path, kind: type[Settings], value: Any, name: str) -> Settings:
    try:
        return from_mapping(kind, value, name)
    except ConfigError as error:
        raise ConfigError(f"{root / 'settings.toml'}: {error}") from None
