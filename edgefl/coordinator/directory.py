"""The coordinator's state directory: keys, settings and access tokens; private, and written atomically.

A directory counts as set up when `settings.toml` exists, and that file is written last: an interrupted setup is
repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from edgefl.coordinator import pki
from edgefl.core.config import (
    AlertSettings,
    CertificateSettings,
    ConnectionSettings,
    HomeAssistantSettings,
    OpenIdSettings,
)
from edgefl.core.errors import ConfigError, NotJoinedError, UsageError
from edgefl.core.extensions import check_module_name
from edgefl.core.protocol import COORDINATOR_NAME, certificate_fingerprint, validate_slug
from edgefl.core.safe_parsing import format_toml, parse_toml
from edgefl.core.settings import from_mapping
from edgefl.system.atomic_files import (
    DATABASE_NAME,
    ChildPath,
    lock_file,
    make_private_directory,
    remove_temporary_files,
    write_atomic,
)

DEFAULT_FLEET = "fleet"
DEFAULT_PORT = 8000
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Settings = TypeVar(
    "Settings", AlertSettings, CertificateSettings, ConnectionSettings, HomeAssistantSettings, OpenIdSettings
)
SIOCGIFADDR = 0x8915
# Documentation addresses: connecting a datagram socket only picks a route.
PROBE_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorDirectory:
    """One coordinator's directory and its settings.

    `hosts` are the names and addresses under which devices find the coordinator, best first. Of the access tokens
    only SHA-256 hashes are stored. `store` is the URL of a database server, perhaps with a password; None for SQLite
    in the directory. `shared_models` is the URL of the files that its hosts share, None for one host alone.
    `allow_modules` may be imported for a name in a run file.
    """

    root: Path
    fleet: str
    hosts: tuple[str, ...]
    port: int = DEFAULT_PORT
    operator_sha256: tuple[str, ...] = field(default=(), repr=False)
    viewer_sha256: tuple[str, ...] = field(default=(), repr=False)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    certificates: CertificateSettings = field(default_factory=CertificateSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    home_assistant: HomeAssistantSettings = field(default_factory=HomeAssistantSettings)
    openid: OpenIdSettings = field(default_factory=OpenIdSettings)
    store: str | None = field(default=None, repr=False)
    shared_models: str | None = None
    allow_modules: tuple[str, ...] = ()

    settings = ChildPath("settings.toml")
    ca_cert = ChildPath("ca.pem")
    ca_key = ChildPath("ca.key")
    server_cert = ChildPath("server.pem")
    server_key = ChildPath("server.key")
    client_cert = ChildPath("coordinator.pem")
    client_key = ChildPath("coordinator.key")
    database = ChildPath(DATABASE_NAME)
    models = ChildPath("models")
    bases = ChildPath("bases")
    compiled = ChildPath("compiled")
    runs = ChildPath("runs")
    broker = ChildPath("broker")
    setup_script = ChildPath("setup.sh")
    setup_payload = ChildPath("setup.tar")

    @property
    def store_url(self) -> str | Path:
        """Location of the store, for `Store.open`."""
        return self.store or self.database

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT for every host, best first; IPv6 in brackets."""
        return tuple(f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in self.hosts)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the directory for one running coordinator; the lock ends with the process.

        Raises:
            StoreBusyError: another coordinator runs on this directory.
            StoreError: it cannot be written.
        """
        error_message = f"another coordinator runs on {self.root}; stop it first, or take another --dir"
        with lock_file(self.root / "lock", error_message):
            remove_temporary_files(self.root)
            yield

    def lock_broker(self) -> contextlib.AbstractContextManager[None]:
        """Locks the directory for one running broker, whether a coordinator has started it or not.

        Raises:
            StoreError: another broker runs on this directory, or it cannot be written.
        """
        return lock_file(
            self.root / "broker.lock",
            f"a broker runs on {self.root} already; stop it first, or let the coordinator use it: "
            "edgefl coordinator start --broker mqtts://HOST:PORT",
        )

    def load_authority(self) -> pki.KeyPair:
        """Returns the CA with its key."""
        return pki.KeyPair(key_pem=self.ca_key.read_bytes(), cert_pem=self.ca_cert.read_bytes())

    def compute_ca_fingerprint(self) -> str:
        return certificate_fingerprint(self.ca_cert.read_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options of `edgefl coordinator start`; `alerts` None for those of the directory.

    At most `parallel_runs` runs are active at a time.
    """

    host: str = "0.0.0.0"  # noqa: S104 boards are on other machines
    port: int = DEFAULT_PORT
    broker: str = "auto"
    broker_port: int = 8883
    test_shards: Mapping[str, Path] = field(default_factory=dict)
    heartbeat_s: float = 5.0
    device_metrics: int = 1000
    alerts: AlertSettings | None = None
    keep_history_days: float | None = None
    parallel_runs: int = 1

    @property
    def has_external_broker(self) -> bool:
        return self.broker.startswith("mqtts://")


def default_directory() -> Path:
    """Returns `~/.local/share/edgefl/coordinator`, or its counterpart under `XDG_DATA_HOME`."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "edgefl" / "coordinator"


def init_directory(
    root: Path, *, hosts: Sequence[str] = (), fleet: str | None = None, port: int | None = None
) -> CoordinatorDirectory:
    """Returns the directory, set up: CA, server and MQTT certificates, settings, empty folders.

    A directory that is already set up keeps its CA, its devices and its tokens; hosts that are new are added.

    Raises:
        ConfigError: it is set up for another fleet or port, or holds a database without settings.
        UsageError: the fleet's name or a host is invalid.
    """
    template = CoordinatorDirectory(root=root, fleet=validate_slug(fleet or DEFAULT_FLEET, "fleet name"), hosts=())
    if template.settings.exists():
        return _update_directory(load_directory(root), hosts, fleet, port)
    if template.database.exists():
        raise ConfigError(f"{root} holds a database but no settings.toml; restore a backup or take another --dir")
    directory = replace(template, hosts=_advertised_hosts(hosts), port=port or DEFAULT_PORT)
    make_private_directory(root)
    authority = pki.create_authority(directory.fleet)
    server = pki.issue_server_certificate(authority, _certificate_hosts(directory.hosts))
    client = pki.issue_client_certificate(authority, COORDINATOR_NAME, days=directory.certificates.server_days)
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
        NotJoinedError: it is not set up.
        ConfigError: its settings are damaged, or a key is missing.
    """
    value = _read_settings(root)
    if value is None:
        raise NotJoinedError(f"{root} is no coordinator directory; run: edgefl coordinator init --dir {root}")
    directory = _parse_settings(root, value)
    for file in (directory.ca_cert, directory.ca_key, directory.server_cert, directory.server_key):
        if not file.exists():
            raise ConfigError(f"{file} is missing; restore it from a backup of {root}")
    return directory


def find_store(root: Path) -> str | Path:
    """Returns the location of a coordinator's or simulation's store, for `Store.open`.

    Raises:
        ConfigError: the settings there are damaged.
    """
    value = _read_settings(root) or {}
    return str(value["store"]) if "store" in value else root / DATABASE_NAME


def change_addresses(root: Path, hosts: Sequence[str], *, port: int | None = None) -> CoordinatorDirectory:
    """Returns the directory with a new server certificate and address list; the CA stays.

    Devices that joined keep trusting it; they get the new addresses when they next connect. Without `hosts` the names
    and addresses of this machine are used.
    """
    directory = load_directory(root)
    changed = replace(directory, hosts=_advertised_hosts(hosts), port=port or directory.port)
    _issue_server_certificate(changed)
    _write_settings(changed)
    return changed


def issue_own_certificates(directory: CoordinatorDirectory) -> None:
    """Issues new certificates of the server and the coordinator's MQTT client, with new keys."""
    days = directory.certificates.server_days
    client = pki.issue_client_certificate(directory.load_authority(), COORDINATOR_NAME, days=days)
    _write_pair(directory.client_cert, directory.client_key, client)
    _issue_server_certificate(directory)


def add_access_tokens(directory: CoordinatorDirectory) -> tuple[CoordinatorDirectory, str, str]:
    """Returns the directory with one more operator and one more viewer token, and these two as plain text."""
    operator, viewer = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    changed = replace(
        directory,
        operator_sha256=(*directory.operator_sha256, hash_token(operator)),
        viewer_sha256=(*directory.viewer_sha256, hash_token(viewer)),
    )
    _write_settings(changed)
    return changed, operator, viewer


def set_store(directory: CoordinatorDirectory, url: str | None) -> CoordinatorDirectory:
    """Returns the directory with its store at this URL, saved in its settings; None changes nothing.

    The content of the former store stays where it is.

    Raises:
        StoreError: no store can be opened there; the settings are unchanged.
        MissingPackageError: its database driver is not installed.
    """
    from edgefl.storage.store import Store  # noqa: PLC0415 SQLAlchemy is slow to load

    if url is None or url == directory.store:
        return directory
    Store.open(url).close()
    changed = replace(directory, store=url)
    _write_settings(changed)
    return changed


def set_shared_models(directory: CoordinatorDirectory, url: str | None) -> CoordinatorDirectory:
    """Returns the directory whose hosts share files at this URL, saved in its settings; None changes nothing.

    Raises:
        UsageError: the URL is no place for them, or the store is no database server; the settings are unchanged.
        StoreError: there is no such folder.
    """
    if url is None or url == directory.shared_models:
        return directory
    from edgefl.storage.shared_objects import open_shared_objects  # noqa: PLC0415 only with a second host

    open_shared_objects(url)
    if directory.store is None or "://" not in directory.store:
        raise UsageError("--models needs a store on PostgreSQL beside it: --store postgresql://USER@HOST/DATABASE")
    changed = replace(directory, shared_models=url)
    _write_settings(changed)
    return changed


def add_allowed_modules(directory: CoordinatorDirectory, modules: Sequence[str]) -> CoordinatorDirectory:
    """Returns the directory with more modules that run files may name, saved in its settings.

    Raises:
        UsageError: one is no module's name, or is of Python's own library; the settings are unchanged.
    """
    for module in modules:
        check_module_name(module)
    changed = replace(directory, allow_modules=tuple(dict.fromkeys([*directory.allow_modules, *modules])))
    if changed != directory:
        _write_settings(changed)
    return changed


def hash_token(token: str) -> str:
    """Returns the SHA-256 of a token, as stored in settings and store."""
    return hashlib.sha256(token.encode()).hexdigest()


def _update_directory(
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
    return change_addresses(directory.root, [*new, *directory.hosts])


def _issue_server_certificate(directory: CoordinatorDirectory) -> None:
    days = directory.certificates.server_days
    server = pki.issue_server_certificate(directory.load_authority(), _certificate_hosts(directory.hosts), days=days)
    _write_pair(directory.server_cert, directory.server_key, server)


def _advertised_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Returns the hosts for join tokens: those given, else this machine's name and addresses."""
    if hosts:
        return tuple(dict.fromkeys(hosts))
    names = [name for name in [_mdns_name()] if pki.HOST_NAME.match(name)]
    return (*names, *list_local_addresses()) if list_local_addresses() else ("127.0.0.1",)


def _certificate_hosts(hosts: Sequence[str]) -> list[str]:
    """Returns the hosts for the certificate: more than advertised, since an extra name does no harm."""
    names = [name for name in (socket.gethostname().lower(), _mdns_name()) if pki.HOST_NAME.match(name)]
    return list(dict.fromkeys([*hosts, *names, *list_local_addresses(), *LOOPBACK]))


def _mdns_name() -> str:
    return f"{socket.gethostname().partition('.')[0].lower()}.local"


def _write_pair(cert: Path, key: Path, pair: pki.KeyPair) -> None:
    write_atomic(key, pair.key_pem)
    write_atomic(cert, pair.cert_pem)


def _write_settings(directory: CoordinatorDirectory) -> None:
    values: dict[str, Any] = {
        "fleet": directory.fleet,
        "hosts": list(directory.hosts),
        "port": directory.port,
        "operator_sha256": list(directory.operator_sha256),
        "viewer_sha256": list(directory.viewer_sha256),
    } | ({} if directory.store is None else {"store": directory.store})
    if directory.shared_models is not None:
        values["shared_models"] = directory.shared_models
    if directory.allow_modules:
        values["allow_modules"] = list(directory.allow_modules)
    tables: dict[str, Any] = {
        "alerts": directory.alerts,
        "certificates": directory.certificates,
        "connections": directory.connections,
        "home_assistant": directory.home_assistant,
        "openid": directory.openid,
    }
    for name, table in tables.items():
        defaults = asdict(type(table)())
        if changed := {key: value for key, value in asdict(table).items() if value != defaults[key]}:
            values[name] = changed
    write_atomic(directory.settings, format_toml(values).encode())


def _read_settings(root: Path) -> dict[str, Any] | None:
    path = root / "settings.toml"
    try:
        return parse_toml(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _parse_settings(root: Path, value: Mapping[str, Any]) -> CoordinatorDirectory:
    types_by_key = {"fleet": str, "hosts": list, "port": int, "operator_sha256": list, "viewer_sha256": list}
    optional_types = {"store": str, "shared_models": str, "allow_modules": list}
    for key, kind in (types_by_key | {key: kind for key, kind in optional_types.items() if key in value}).items():
        if not isinstance(value.get(key), kind):
            raise ConfigError(f"{root / 'settings.toml'}: {key} must be a {kind.__name__}, got {value.get(key)!r}")
    sections = {"alerts", "certificates", "connections", "home_assistant", "openid"}
    if unknown := sorted(set(value) - set(types_by_key) - set(optional_types) - sections):
        raise ConfigError(
            f"{root / 'settings.toml'}: unknown key {unknown[0]!r}, known are {', '.join(types_by_key)}"
        )
    return CoordinatorDirectory(
        root=root,
        fleet=value["fleet"],
        hosts=tuple(map(str, value["hosts"])),
        port=value["port"],
        operator_sha256=tuple(value["operator_sha256"]),
        viewer_sha256=tuple(value["viewer_sha256"]),
        alerts=_parse_section(root, AlertSettings, value.get("alerts", {}), "alerts"),
        certificates=_parse_section(root, CertificateSettings, value.get("certificates", {}), "certificates"),
        connections=_parse_section(root, ConnectionSettings, value.get("connections", {}), "connections"),
        home_assistant=_parse_section(root, HomeAssistantSettings, value.get("home_assistant", {}), "home_assistant"),
        openid=_parse_section(root, OpenIdSettings, value.get("openid", {}), "openid"),
        store=value.get("store"),
        shared_models=value.get("shared_models"),
        allow_modules=tuple(map(str, value.get("allow_modules", ()))),
    )


def _parse_section(root: Path, kind: type[Settings], value: Any, name: str) -> Settings:
    try:
        return from_mapping(kind, value, name)
    except ConfigError as error:
        raise ConfigError(f"{root / 'settings.toml'}: {error}") from None


def list_local_addresses() -> tuple[str, ...]:
    """Returns this machine's reachable addresses, that of the default route first."""
    addresses = [*_list_routed(), *_list_interface_addresses(), *_list_resolved()]
    usable = (address for address in addresses if _is_reachable(address))
    return tuple(dict.fromkeys(usable))


def _list_routed() -> list[str]:
    addresses: list[str] = []
    for family, target in PROBE_ADDRESSES:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            addresses.append(str(probe.getsockname()[0]))
    return addresses


def _list_interface_addresses() -> list[str]:
    try:
        import fcntl  # noqa: PLC0415 not on every system
    except ImportError:
        return []
    addresses: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
    return addresses


def _list_resolved() -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return []


def _is_reachable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast)
