"""Embedded broker, for fleets of up to about 100 devices: an event loop in a thread, and its clients' connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

from edgefl.coordinator.brokers import packets
from edgefl.coordinator.brokers.broker import (
    MAX_QUEUED_BYTES,
    MISSING_CERTIFICATE,
    UNTRUSTED_CERTIFICATE,
    BrokerAddress,
    OnDenied,
    get_connect_host,
    ignore_denied,
    make_port_error,
)
from edgefl.coordinator.brokers.packets import (
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PacketReader,
    PingPacket,
    PubackPacket,
    PublishPacket,
    SubscribePacket,
    UnsubscribePacket,
)
from edgefl.coordinator.brokers.topic_router import TopicRouter
from edgefl.coordinator.connections import ConnectionLimiter, ConnectionSlot, make_limiters
from edgefl.coordinator.tls_server import TlsListener, bind_listener, make_server_context
from edgefl.core.config import ConnectionSettings
from edgefl.core.errors import BrokerError, EdgeflError, NetworkError
from edgefl.system.atomic_files import TlsFiles

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
BACKLOG = 1000
"""Connections queued by the system until accepted: a whole fleet reconnects at once."""
KEEP_ALIVE_FACTOR = 1.5
MAX_IN_FLIGHT = 10_000
"""Maximum unacknowledged messages at QoS 1 of a client; others wait behind them."""
PACKET_OVERHEAD_BYTES = 200
"""Memory of a queued packet beside its content."""
WRITE_BATCH_BYTES = 64 * 1024


class EmbeddedBroker:
    """Runs the broker in an event loop of its own thread; see `edgefl.coordinator.brokers.broker.Broker`."""

    def __init__(
        self,
        *,
        fleet: str,
        tls: TlsFiles,
        host: str = "127.0.0.1",
        port: int,
        limiter: ConnectionLimiter | None = None,
        on_denied: OnDenied = ignore_denied,
    ) -> None:
        self._on_denied = on_denied
        self._limiter = limiter or make_limiters(ConnectionSettings())[1]
        self._fleet = fleet
        self._tls = tls
        self._host = host
        self._port = port
        self._revoked: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router: TopicRouter | None = None
        self._listener: TlsListener | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: EdgeflError | None = None

    def start(self) -> BrokerAddress:
        self._started.clear()
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="embedded-broker", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise BrokerError(f"the embedded broker does not start within {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure
        return BrokerAddress(host=get_connect_host(self._host), port=self._port)

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop is already closed
                self._loop.call_soon_threadsafe(self._stop.set)
        thread.join()

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._failure is None

    def revoke(self, names: Collection[str], serials: Collection[str] = ()) -> None:
        self._revoked = frozenset(names), frozenset(serials)
        if self._router is not None:
            self._call_in_loop(self._router.revoke, *self._revoked)

    def reload(self) -> None:
        if self._listener is not None:
            try:
                self._listener.context = _make_server_context(self._tls, self._on_denied)
            except BrokerError as error:
                log.warning("the broker goes on with its old certificate: %s", error)

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function in the broker's own thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # stopped meanwhile
                self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except EdgeflError as error:
            self._failure = error
        except Exception as error:  # the boundary of the thread: every error must reach the coordinator
            log.exception("the embedded broker ended")
            self._failure = BrokerError(f"the embedded broker ended: {error}")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_loop_error)
        self._stop = asyncio.Event()
        self._router = router = TopicRouter(self._fleet, self._on_denied)
        router.revoke(*self._revoked)
        connections = set[ClientConnection]()
        context = _make_server_context(self._tls, self._on_denied)
        try:
            listener = bind_listener(self._host, self._port, backlog=BACKLOG)
        except OSError as error:
            raise make_port_error(self._host, self._port, error) from None
        self._listener = tls_listener = TlsListener(
            listener,
            context,
            self._limiter,
            lambda slot: ClientConnection(router, connections, slot),
        )
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            self._router = self._listener = None
            await tls_listener.close()
            for connection in list(connections):
                connection.abort(should_publish_will=False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    while connections:  # noqa: ASYNC110 a few turns of the loop
                        await asyncio.sleep(0)


def _make_server_context(tls: TlsFiles, on_denied: OnDenied) -> ssl.SSLContext:
    try:
        context = make_server_context(tls.cert, tls.key)
        context.load_verify_locations(tls.ca)
    except OSError as error:  # ssl.SSLError is one
        raise BrokerError(
            f"the broker's TLS files cannot be used ({tls.ca}, {tls.cert}, {tls.key}): {error}"
        ) from None
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would not check the dates of its certificate again.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    context.sslobject_class = _make_reporting_class(on_denied)
    return context


def _make_reporting_class(on_denied: OnDenied) -> type[ssl.SSLObject]:
    """Returns a class of TLS connections that report invalid certificates, which asyncio does not."""

    class ReportingSSLObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLCertVerificationError:
                on_denied("", UNTRUSTED_CERTIFICATE)
                raise
            except ssl.SSLError as error:
                if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
                    on_denied("", MISSING_CERTIFICATE)
                raise

    return ReportingSSLObject


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs failed handshakes and broken connections at debug level, other errors as bugs."""
    error = context.get("exception")
    is_expected = error is None or isinstance(error, OSError)
    log.log(logging.DEBUG if is_expected else logging.ERROR, "broker: %s", context.get("message"), exc_info=error)


@dataclass(frozen=True, slots=True)
class _Delivery:
    message: PublishPacket
    qos: int
    is_retained: bool


class ClientConnection(asyncio.Protocol):
    """Runs in the broker's event loop, behind TLS. The common name of the certificate is the client's identity.

    Sessions are always clean, and the client id is ignored.

    Args:
        router: has its session from CONNECT on.
        connections: holds this connection while it is open.
        slot: its place in the limiter; it is pending until its CONNECT, for which there is a deadline.
    """

    def __init__(self, router: TopicRouter, connections: set[ClientConnection], slot: ConnectionSlot) -> None:
        self.identity = ""
        self._serial = ""
        self._router, self._connections, self._slot = router, connections, slot
        self._loop = asyncio.get_running_loop()
        self._reader = PacketReader()
        self._has_session = self._is_closing = False
        self._will: PublishPacket | None = None
        self._keep_alive_s = 0.0
        self._received_at_s = 0.0
        self._queue: deque[bytes | _Delivery] = deque()
        self._queued_bytes = 0
        self._is_flush_due = self._is_paused = False
        self._in_flight: set[int] = set()
        self._last_packet_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        self.identity, self._serial = get_certificate_identity(transport.get_extra_info("ssl_object"))
        self._slot.close = self._abort_pending
        self._timer = self._loop.call_later(self._slot.limiter.settings.header_s, self._on_connect_deadline)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received_at_s = self._loop.time()
        try:
            for packet in self._reader.feed(data):
                self._receive(packet)
                if self._transport.is_closing():
                    return
        except NetworkError as error:
            log.debug("cut the connection of %s: %s", self.identity, error)
            self.abort()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def connection_lost(self, _error: Exception | None) -> None:
        self._close_session()
        self._connections.discard(self)
        self._slot.release()

    def deliver(self, message: PublishPacket, qos: int, *, is_retained: bool) -> None:
        """Queues a message; cuts the connection of a client that reads too slowly for what it has subscribed to."""
        self._enqueue(_Delivery(message, qos, is_retained))

    def abort(self, *, should_publish_will: bool = True) -> None:
        """Cuts the connection; its will is published unless `should_publish_will` is false."""
        if not should_publish_will:
            self._will = None
        self._close_session()
        self._transport.abort()

    def _receive(self, packet: Packet) -> None:
        match packet:
            case PublishPacket():
                self._router.publish(self.identity, packet)
                if packet.qos:
                    self._enqueue(packets.encode_puback(packet.packet_id))
            case PubackPacket():
                self._in_flight.discard(packet.packet_id)
                self._schedule_flush()
            case PingPacket():
                self._enqueue(packets.PINGRESP)
            case SubscribePacket():
                self._subscribe(packet)
            case UnsubscribePacket():
                for name in packet.filters:
                    self._router.unsubscribe(self, name)
                self._enqueue(packets.encode_unsuback(packet.packet_id))
            case ConnectPacket():
                self._connect(packet)
            case DisconnectPacket():
                self._will = None
                self._close()

    def _connect(self, packet: ConnectPacket) -> None:
        if packet.level != packets.PROTOCOL_LEVEL:
            self._reject(packets.BAD_PROTOCOL_LEVEL)
        elif not packet.client_id and not packet.is_clean:
            self._reject(packets.BAD_CLIENT_ID)  # [MQTT-3.1.3-8]
        elif self._router.is_revoked(self.identity, self._serial):
            host = str((self._transport.get_extra_info("peername") or "?")[0])
            self._router.on_denied(
                self.identity, f"a connection from {host}: it was removed, or renewed its certificate"
            )
            self._reject(packets.NOT_AUTHORISED)
        else:
            self._timer.cancel()
            self._slot.authenticate(self.identity)
            self._router.connect(self)
            self._has_session, self._will = True, packet.will
            self._enqueue(packets.encode_connack(packets.ACCEPTED))
            self._keep_alive_s = packet.keep_alive_s * KEEP_ALIVE_FACTOR
            if self._keep_alive_s:
                self._timer = self._loop.call_later(self._keep_alive_s, self._check_keep_alive)

    def _on_connect_deadline(self) -> None:
        self._slot.limiter.count_refusal("header")
        self.abort()

    def _abort_pending(self, _reason: str) -> None:
        self.abort()

    def _reject(self, code: int) -> None:
        self._enqueue(packets.encode_connack(code))
        self._close()

    def _subscribe(self, packet: SubscribePacket) -> None:
        granted = [(name, self._router.subscribe(self, name, qos)) for name, qos in packet.filters]
        self._enqueue(packets.encode_suback(packet.packet_id, [code for _, code in granted]))
        for name, code in dict(granted).items():
            if code != packets.SUBSCRIPTION_FAILED:
                self._router.replay_retained(self, name, code)

    def _check_keep_alive(self) -> None:
        """Cuts the connection when nothing came for too long; bytes in the middle of a large packet count."""
        remaining_s = self._received_at_s + self._keep_alive_s - self._loop.time()
        if remaining_s <= 0:
            log.debug("%s sent nothing for %.1f s", self.identity, self._keep_alive_s)
            self.abort()
        else:
            self._timer = self._loop.call_later(remaining_s, self._check_keep_alive)

    def _enqueue(self, item: bytes | _Delivery) -> None:
        if self._is_closing:
            return
        self._queue.append(item)
        self._queued_bytes += _num_bytes(item)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            log.warning(
                "cut the connection of %s, which reads too slowly: %d packets of %d bytes wait for it",
                self.identity, len(self._queue), self._queued_bytes,
            )  # fmt: skip
            self._is_closing = True
            self._queue.clear()
            self._loop.call_soon(self.abort)  # not now: its will could fill another queue, and so on
        else:
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        """Writes the queue once the received packets have been handled: fewer, larger writes."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        while not self._is_paused and (content := self._pop_write_batch()):
            self._transport.write(content)

    def _pop_write_batch(self) -> bytes:
        """Pops about `WRITE_BATCH_BYTES` off the queue; nothing while the next packet has to wait."""
        encoded, size = [], 0
        while self._queue and size < WRITE_BATCH_BYTES:
            item = self._queue[0]
            if isinstance(item, _Delivery) and item.qos and len(self._in_flight) >= MAX_IN_FLIGHT:
                break
            self._queue.popleft()
            self._queued_bytes -= _num_bytes(item)
            encoded.append(item if isinstance(item, bytes) else self._encode(item))
            size += len(encoded[-1])
        return b"".join(encoded)

    def _encode(self, delivery: _Delivery) -> bytes:
        packet_id = 0
        if delivery.qos:
            packet_id = self._last_packet_id % packets.MAX_FIELD_BYTES + 1
            while packet_id in self._in_flight:
                packet_id = packet_id % packets.MAX_FIELD_BYTES + 1
            self._last_packet_id = packet_id
            self._in_flight.add(packet_id)
        return packets.encode_publish(
            delivery.message, qos=delivery.qos, is_retained=delivery.is_retained, packet_id=packet_id
        )

    def _close(self) -> None:
        """Writes the queue and closes the connection; the listener's timeout bounds how long that takes."""
        self._flush()
        self._close_session()
        self._transport.close()

    def _close_session(self) -> None:
        self._timer.cancel()
        self._is_closing = True
        self._queue.clear()
        if self._has_session:
            self._has_session = False
            self._router.disconnect(self, self._will)


def get_certificate_identity(connection: ssl.SSLObject | None) -> tuple[str, str]:
    """Returns the common name of the client's certificate, or an empty string, and its serial in hexadecimal."""
    certificate: Any = (connection.getpeercert() if connection is not None else None) or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    serial = f"{int(certificate.get('serialNumber', '0'), 16):x}"
    return (str(names[0]) if len(names) == 1 else ""), serial


def _num_bytes(item: bytes | _Delivery) -> int:
    """Returns the size of a queued packet."""
    if isinstance(item, bytes):
        return PACKET_OVERHEAD_BYTES + len(item)
    return PACKET_OVERHEAD_BYTES + item.message.num_bytes
