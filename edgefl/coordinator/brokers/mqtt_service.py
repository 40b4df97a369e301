"""MQTT service of a fleet: the coordinator's client, and the choice of the broker, beside it or as its own process.

The retained messages of a broker in a process of its own outlive restarts of the coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.coordinator.auth import RecordRejection, RejectedRequestLog, is_loopback
from edgefl.coordinator.brokers.broker import (
    CONNECT_TIMEOUT_S,
    Broker,
    BrokerAddress,
    OnDenied,
    RevocationSync,
    ignore_denied,
    make_client_context,
)
from edgefl.coordinator.brokers.embedded_broker import EmbeddedBroker
from edgefl.coordinator.brokers.mosquitto import Mosquitto, find_mosquitto
from edgefl.coordinator.connections import ConnectionLimiter, make_limiters
from edgefl.coordinator.directory import CoordinatorDirectory, StartOptions
from edgefl.coordinator.enrolment.certificates import get_own_serial
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.pki import KeyPair
from edgefl.core.errors import BrokerError, ConfigError, EdgeflError, NetworkError, StoreError
from edgefl.core.protocol import (
    COORDINATOR_NAME,
    FROM_DEVICE,
    MAX_JSON_BYTES,
    Command,
    Topic,
    is_slug,
    parse_topic,
    topic,
)
from edgefl.storage.store import Store
from edgefl.system.atomic_files import TlsFiles
from edgefl.system.processes import LivenessMonitor, SystemdNotifier, on_stop_signal, raise_file_limit, run_watchdog
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

# Short, so that a silently lost broker is noticed (within two of these) before silence makes the devices look gone:
# presence stops its clock while the client is disconnected.
KEEP_ALIVE_S = 4
MAX_RECONNECT_DELAY_S = 2

QOS = {Topic.STATUS: 1, Topic.CAPABILITIES: 1, Topic.HEARTBEAT: 0, Topic.PROGRESS: 0, Topic.ANSWER: 1}

OnMessage = Callable[[str, Topic, bytes], None]
OnConnection = Callable[[bool], None]

CLIENT_TIMEOUT_S = 3.0
REVOCATION_INTERVAL_S = 2.0
DEFAULT_MQTTS_PORT = 8883


class MqttClient:
    """The coordinator's connection to the broker: messages of devices, wake-ups and commands. It reconnects for ever.

    Both callbacks run in the client's own thread and should return soon. A message for which `on_message` raises an
    `EdgeflError` counts as malformed.
    """

    def __init__(
        self,
        address: BrokerAddress,
        tls: TlsFiles,
        fleet: str,
        on_message: OnMessage,
        on_connection: OnConnection,
    ) -> None:
        self._address = address
        self._fleet = fleet
        self._on_message = on_message
        self._on_connection = on_connection
        self._rate_limited_log, self._malformed_counts = RateLimitedLog(log), Counter[str]()
        self._is_connected = threading.Event()
        self._client = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id=COORDINATOR_NAME, clean_session=True, protocol=mqtt.MQTTv311
        )
        self._tls, self._context = address.tls or tls, make_client_context(address.tls or tls)
        self._client.tls_set_context(self._context)
        self._client.reconnect_delay_set(1, MAX_RECONNECT_DELAY_S)
        self._client.on_connect = self._handle_connect
        self._client.on_disconnect = self._handle_disconnect
        self._client.on_connect_fail = self._handle_connect_failure
        self._client.on_message = self._handle_message

    def connect(self) -> None:
        """Starts the thread that connects and reconnects until `close`; returns at once."""
        self._client.connect_async(self._address.host, self._address.port, keepalive=KEEP_ALIVE_S)
        self._client.loop_start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the connection; returns whether it is connected."""
        return self._is_connected.wait(timeout_s)

    def is_connected(self) -> bool:
        return self._is_connected.is_set()

    def reload(self) -> None:
        """Loads the certificate from its files again, for the next connection."""
        self._context.load_cert_chain(self._tls.cert, self._tls.key)

    def notify(self, device_id: str) -> None:
        """Sends a device a wake-up for pending work; lost while disconnected, when devices poll anyway."""
        if self.is_connected():
            self._client.publish(topic(self._fleet, device_id, Topic.WAKEUP), b"", qos=0)

    def send_command(self, device_id: str, command: Command) -> None:
        """Sends a command; while disconnected it is queued until the reconnect."""
        self._client.publish(topic(self._fleet, device_id, Topic.COMMAND), command.dump(), qos=1)

    def clear_retained(self, device_id: str) -> None:
        """Clears the retained messages of a removed device."""
        for kind in (Topic.STATUS, Topic.CAPABILITIES):
            self._client.publish(topic(self._fleet, device_id, kind), b"", qos=1, retain=True)

    def close(self) -> None:
        """Disconnects and ends the thread."""
        self._client.disconnect()
        self._client.loop_stop()
        self._is_connected.clear()

    def malformed_counts(self) -> dict[str, int]:
        """Returns the number of dropped messages by device."""
        return dict(self._malformed_counts)

    def _handle_connect(self, client: mqtt.Client, _data: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if reason.is_failure:
            log.warning("the broker at %s:%d refuses us: %s", self._address.host, self._address.port, reason)
            return
        # Presence first: the retained messages of the subscription count from now on.
        self._is_connected.set()
        self._notify_connection(connected=True)
        client.subscribe([(topic(self._fleet, "+", kind), QOS[kind]) for kind in FROM_DEVICE])
        log.info("connected to the broker at %s:%d", self._address.host, self._address.port)

    def _handle_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if not self._is_connected.is_set():
            return
        self._is_connected.clear()
        self._notify_connection(connected=False)
        if reason.is_failure:
            log.warning("lost the broker at %s:%d (%s)", self._address.host, self._address.port, reason)

    def _handle_connect_failure(self, _client: Any, _data: Any) -> None:
        text = "cannot reach the broker at %s:%d; trying again"
        self._rate_limited_log.warning("", text, self._address.host, self._address.port)

    def _notify_connection(self, *, connected: bool) -> None:
        try:
            self._on_connection(connected)
        except Exception:  # the boundary of paho's thread: it would end, and the fleet with it
            log.exception("the coordinator failed to handle a change of its broker connection")

    def _handle_message(self, _client: Any, _data: Any, message: mqtt.MQTTMessage) -> None:
        sender = "?"
        try:
            fleet, sender, kind = parse_topic(message.topic)
            if message.payload:  # an empty one only clears a retained message
                self._on_message(sender, kind, self._validate_payload(fleet, kind, message))
        except EdgeflError as error:
            self._malformed_counts[sender] += 1
            self._rate_limited_log.warning(sender, "dropped a message of %s: %s", sender, error)
        except Exception:  # likewise: one message must not stop the others
            log.exception("the coordinator failed to handle a message of %s", sender)

    def _validate_payload(self, fleet: str, kind: Topic, message: mqtt.MQTTMessage) -> bytes:
        if fleet != self._fleet or kind not in FROM_DEVICE:
            raise NetworkError(f"not for the coordinator: {message.topic!r}")
        if len(message.payload) > MAX_JSON_BYTES:
            raise NetworkError(f"{kind} of {len(message.payload)} bytes, at most {MAX_JSON_BYTES} are read")
        return bytes(message.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalBroker:
    """A broker run outside the coordinator, with its own rules (required ones: docs/reference/protocol.md)."""

    address: BrokerAddress

    def start(self) -> BrokerAddress:
        """Returns its address; only warns if it is unreachable, since the client retries for ever."""
        try:
            self._check_handshake()
        except ssl.SSLCertVerificationError as error:
            raise BrokerError(f"{self._label} shows a certificate that does not verify: {error.reason}") from None
        except OSError as error:
            log.warning("%s cannot be reached (%s); trying again until it answers", self._label, error)
        return self.address

    def stop(self) -> None:
        """Does nothing."""

    def is_alive(self) -> bool:
        try:
            self._check_handshake()
        except OSError:
            return False
        return True

    def reload(self) -> None:
        """Does nothing: `edgefl coordinator broker` reloads a changed certificate by itself."""

    def revoke(self, names: Collection[str], serials: Collection[str] = ()) -> None:  # noqa: ARG002 see `Broker`
        """Warns that the operator of the broker has to do this."""
        if names:
            log.warning(
                "%s has to shut out the removed devices %s; `edgefl coordinator broker` does that by itself",
                self._label,
                ", ".join(sorted(names)),
            )

    @property
    def _label(self) -> str:
        return f"the broker at {self.address.host}:{self.address.port}"

    def _check_handshake(self) -> None:
        address = (self.address.host, self.address.port)
        with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as raw, contextlib.ExitStack() as stack:
            if self.address.tls is not None:
                context = make_client_context(self.address.tls)
                stack.enter_context(context.wrap_socket(raw, server_hostname=self.address.host))


def parse_external_broker(spec: str) -> ExternalBroker:
    """Returns the broker that an mqtts:// address names.

    Raises:
        ConfigError: no host, an invalid port, unknown options, or only some of the three files.
    """
    try:
        url = urlsplit(spec)
        port = url.port or DEFAULT_MQTTS_PORT
    except ValueError as error:
        raise ConfigError(f"broker address {spec!r} makes no sense: {error}") from None
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    if not url.hostname or url.path not in {"", "/"} or url.username is not None:
        raise ConfigError(f"broker address must look like mqtts://HOST:PORT, got {spec!r}")
    if options and set(options) != {"ca", "cert", "key"}:
        raise ConfigError(f"broker address takes ca, cert and key together, got {', '.join(sorted(options))}")
    paths = {name: Path(value).expanduser() for name, value in options.items()}
    tls = TlsFiles(ca=paths["ca"], cert=paths["cert"], key=paths["key"]) if paths else None
    return ExternalBroker(address=BrokerAddress(host=url.hostname, port=port, tls=tls))


def make_broker(  # noqa: PLR0913 one keyword per fact
    spec: str,
    *,
    directory: Path,
    fleet: str,
    tls: TlsFiles,
    host: str,
    port: int,
    authority: KeyPair | None = None,
    limiter: ConnectionLimiter | None = None,
    on_denied: OnDenied = ignore_denied,
) -> Broker:
    """Returns the broker that `spec` names, not yet started.

    Args:
        spec: `auto` (mosquitto when it is installed, else embedded), `mosquitto`, `embedded`, or
            `mqtts://host:port?ca=FILE&cert=FILE&key=FILE` for an external one; the files are for the coordinator's
            connection and default to its own.
        directory: of a private mosquitto's files; made with mode 0700.
        fleet: the fleet id, the third level of every topic.
        tls: the CA of the fleet, and the server's certificate and key.
        host: the address to listen on.
        port: the port to listen on.
        authority: the CA with its key; without it mosquitto rejects only names, and disconnects no client.
        limiter: of the embedded broker's connections; None for the default limits.
        on_denied: called with identity and denied action, in a thread of the broker.

    Raises:
        ConfigError: the spec is invalid.
        BrokerError: mosquitto is requested and not installed.
    """
    if spec.startswith("mqtts://"):
        return parse_external_broker(spec)
    program = find_mosquitto() if spec in {"auto", "mosquitto"} else None
    if program is not None:
        return Mosquitto(
            program, directory=directory, fleet=fleet, tls=tls, host=host, port=port, authority=authority,
            on_denied=on_denied,
        )  # fmt: skip
    if spec == "mosquitto":
        raise BrokerError("mosquitto is not installed; install it, or use the embedded broker")
    if spec not in {"auto", "embedded"}:
        raise ConfigError(f"broker must be auto, mosquitto, embedded or mqtts://HOST:PORT, got {spec!r}")
    return EmbeddedBroker(fleet=fleet, tls=tls, host=host, port=port, limiter=limiter, on_denied=on_denied)


class MqttService:
    """Broker and MQTT client, started together and closed through `closers`.

    Args:
        directory: of the coordinator, with the certificates of both ends.
        options: the kind of broker, and where it listens.
        store: has the revoked devices and certificates.
        registry: gets the state of the connection; its devices are woken after a reconnect.
        record_rejection: called for actions that the broker denied.
        on_message: handles device messages, in the client's own thread.
        closers: gets what has to be closed, in the order in which it was opened.
        limiter: of an embedded broker's connections.

    Attributes:
        broker: started.
        client: connected, or trying to connect.
        address: of the broker, seen from here.

    Raises:
        EdgeflError: the broker could not be started.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        directory: CoordinatorDirectory,
        options: StartOptions,
        store: Store,
        registry: DeviceRegistry,
        record_rejection: RecordRejection,
        on_message: OnMessage,
        closers: contextlib.ExitStack,
        limiter: ConnectionLimiter | None = None,
    ) -> None:
        self._directory, self._options, self._registry = directory, options, registry
        if not options.has_external_broker:
            closers.enter_context(directory.lock_broker())
        self.broker, self._revocations = _make_broker(
            directory, store, options.broker, options.host, options.broker_port, record_rejection, limiter
        )
        self.address = self.broker.start()
        closers.callback(self.broker.stop)
        self.client = self._connect(on_message)
        closers.callback(self.client.close)
        if not self.client.wait_connected(CLIENT_TIMEOUT_S):
            log.warning("the broker does not answer yet; devices poll meanwhile")

    def update(self) -> None:
        """Updates the revocations of the broker; see `RevocationSync.update`."""
        self._revocations.update()

    def reload(self) -> None:
        """Reloads the coordinator's certificates, at both ends."""
        self.broker.reload()
        self.client.reload()

    def get_advertised_host(self) -> str | None:
        """Returns the broker's host for devices; None for this machine, which they know already."""
        host = self.address.host
        return host if self._options.has_external_broker and not is_loopback(host) else None

    def _connect(self, on_message: OnMessage) -> MqttClient:
        directory = self._directory
        tls = TlsFiles(ca=directory.ca_cert, cert=directory.client_cert, key=directory.client_key)
        client = MqttClient(
            self.address,
            tls,
            directory.fleet,
            on_message,
            lambda connected: self._on_connection(client, is_connected=connected),
        )
        client.connect()
        return client

    def _on_connection(self, client: MqttClient, *, is_connected: bool) -> None:
        """Updates presence; wakes every device after a reconnect, since wake-ups were lost meanwhile."""
        self._registry.record_broker_link(connected=is_connected)
        if is_connected:
            for info in self._registry.list_schedulable():
                client.notify(info.device_id)


def run_broker(
    directory: CoordinatorDirectory,
    *,
    host: str,
    port: int,
    kind: str = "auto",
    on_ready: Callable[[BrokerAddress], None],
) -> None:
    """Runs the fleet's broker until SIGTERM or SIGINT; removed devices are revoked every `REVOCATION_INTERVAL_S`.

    Args:
        directory: of the coordinator.
        host: address to listen on.
        port: port to listen on.
        kind: auto, mosquitto or embedded.
        on_ready: called with its address once it listens.

    Raises:
        BrokerError: it does not start.
        PortInUseError: the port is taken.
        StoreError: another broker runs on this directory, or the store cannot be opened.
    """
    raise_file_limit()
    stopping, notifier = threading.Event(), SystemdNotifier.from_environment()
    with on_stop_signal(stopping.set), contextlib.ExitStack() as closers:
        closers.enter_context(directory.lock_broker())
        store = closers.enter_context(Store.open(directory.store_url))
        rejections = RejectedRequestLog(store=store, clock=time.time, monotonic=time.monotonic, is_device=is_slug)
        limiter = make_limiters(directory.connections)[1]
        broker, revocations = _make_broker(directory, store, kind, host, port, rejections.record, limiter)
        address = broker.start()
        closers.callback(broker.stop)
        log.info("broker of fleet %s at %s:%d", directory.fleet, host, port)
        on_ready(address)
        liveness = LivenessMonitor()
        with run_watchdog(notifier, liveness):
            certificate = directory.server_cert.read_bytes()
            is_store_readable = True
            while not stopping.wait(REVOCATION_INTERVAL_S):
                liveness.record_progress()
                limiter.log_refusals()
                certificate = _reload_if_renewed(broker, directory.server_cert, certificate)
                try:
                    revocations.update()
                    rejections.flush()
                except StoreError as error:
                    # The devices need the broker even without the store.
                    if is_store_readable:
                        log.warning("devices that are removed now are not yet shut out (%s); trying again", error)
                    is_store_readable = False
                else:
                    is_store_readable = True
        log.info("stopping")


def _make_broker(  # noqa: PLR0913, PLR0917 one keyword per fact
    directory: CoordinatorDirectory,
    store: Store,
    kind: str,
    host: str,
    port: int,
    record_rejection: RecordRejection,
    limiter: ConnectionLimiter | None,
) -> tuple[Broker, RevocationSync]:
    """Returns a broker with the present revocations, not yet started."""
    broker = make_broker(
        kind,
        directory=directory.broker,
        fleet=directory.fleet,
        tls=TlsFiles(ca=directory.ca_cert, cert=directory.server_cert, key=directory.server_key),
        host=host,
        port=port,
        authority=directory.load_authority(),
        limiter=limiter,
        on_denied=lambda identity, action: record_rejection("mqtt", identity, action),
    )
    revocations = RevocationSync(broker, store, get_own_serial=lambda: get_own_serial(directory))
    revocations.update()
    return broker, revocations


def _reload_if_renewed(broker: Broker, path: Path, loaded: bytes) -> bytes:
    """Reloads the broker when a coordinator has renewed the server's certificate; returns the loaded one."""
    with contextlib.suppress(OSError):  # it is being restored from a backup
        current = path.read_bytes()
        if current != loaded:
            broker.reload()
            return current
    return loaded
