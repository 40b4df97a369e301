"""amqtt's broker with TLS identities, our access rules, and its faults mended.

What amqtt 0.11.4 does wrong, and what is done about it here (each pinned by a test):

- Keep-alive is never enforced: `GuardedReader` ends a connection that is silent for 1.5 times its keep-alive; one
  that is in the middle of a large packet is not silent.
- A connecting client is sent retained messages that match other clients' subscriptions, and nobody asks whether it
  may read them: `_publish_retained_messages_for_subscription` checks both.
- Session take-over leaves the old socket open: `_take_over` closes it and waits for its will to be out.
- The end of a connection overtakes what it sent last, or drops it: `MendedHandler` delivers that first.
- A will is sent even where its sender may not publish: `_check_will` drops it.
- What a client retained before it was refused is handed out all the same: `shut_out` lets go of it.
- A client may retain as much as it likes: `retain_message` keeps so much of each and no more.

Identity is the common name of the client's certificate; user name and client id that it sends are replaced by it.
Sessions are always clean: the devices subscribe anew on every connect anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Collection
from typing import Any

from amqtt.adapters import ReaderAdapter, StreamReaderAdapter, StreamWriterAdapter, WriterAdapter
from amqtt.broker import Broker as AmqttBroker
from amqtt.broker import Server
from amqtt.contexts import Action, BrokerConfig, ListenerConfig
from amqtt.errors import AMQTTError
from amqtt.errors import BrokerError as AmqttBrokerError
from amqtt.mqtt.disconnect import DisconnectPacket
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler
from amqtt.session import Session

from edgefl.coordinator.brokers.broker import (
    MAX_MESSAGE_BYTES,
    MAX_RETAINED_BYTES,
    NAMELESS,
    UNTRUSTED,
    BrokerTls,
    OnDenied,
    may_read,
    may_write,
    nobody_is_told,
    port_error,
)
from edgefl.errors import BrokerError, EdgeflError

log = logging.getLogger(__name__)

LISTENER = "default"
KEEP_ALIVE_FACTOR = 1.5
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
PIECE_BYTES = 64 * 1024


class GuardedReader(StreamReaderAdapter):  # type: ignore[misc] # amqtt is not typed
    """Reads from a client under two limits: how long it may be silent, and how much it may send at once."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.WriteTransport, timeout_s: float) -> None:
        super().__init__(reader)
        self._transport = transport
        self.timeout_s: float | None = timeout_s

    async def read(self, n: int = -1) -> bytes:
        if n > MAX_MESSAGE_BYTES:
            self._transport.abort()
            raise ConnectionAbortedError(f"packet of {n} bytes, at most {MAX_MESSAGE_BYTES} are taken")
        pieces = [await self._piece(min(n, PIECE_BYTES))]
        for start in range(PIECE_BYTES, n, PIECE_BYTES):
            pieces.append(await self._piece(min(n - start, PIECE_BYTES)))  # noqa: PERF401 one after the other
        return b"".join(pieces)

    async def _piece(self, n: int) -> bytes:
        """Reads so much that a client which is not silent is sure to have sent it in time."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return bytes(await super().read(n))
        except TimeoutError:
            self._transport.abort()
            # Not a timeout: amqtt's reader loop would take that, and NoDataError, as a reason to read on.
            raise ConnectionAbortedError("the client fell silent") from None


class ImpatientWriter(StreamWriterAdapter):  # type: ignore[misc] # amqtt is not typed
    """Closes without waiting for a peer that no longer reads."""

    is_closed: bool

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        super().__init__(writer)
        self.transport = writer.transport

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.transport.close()  # sends what is buffered; the listener's ssl_shutdown_timeout bounds it


class MendedHandler(BrokerProtocolHandler):  # type: ignore[misc] # amqtt is not typed
    """Lets a connection end only when what it sent is out, and forgets no DISCONNECT.

    amqtt lets the end overtake the queue: the will would come before the last heartbeat. And it forgets a DISCONNECT
    that comes before anybody waits for it, and sends the will.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._goodbye: DisconnectPacket | None = None
        self._delivered = asyncio.Event()

    async def mqtt_deliver_next_message(self) -> Any:
        # The message loop asks for the next one only after it has passed on the one before.
        if self.session.delivered_message_queue.empty():
            self._delivered.set()
        message = await super().mqtt_deliver_next_message()
        self._delivered.clear()
        return message

    async def handle_disconnect(self, disconnect: DisconnectPacket | None) -> None:
        self._goodbye = self._goodbye or disconnect
        if not self.session.delivered_message_queue.empty():
            self._delivered.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._delivered.wait()
        await super().handle_disconnect(disconnect)

    async def wait_disconnect(self) -> DisconnectPacket | None:
        return await super().wait_disconnect() or self._goodbye


class MendedBroker(AmqttBroker):  # type: ignore[misc] # amqtt is not typed
    """amqtt's broker with TLS identities, our access rules, and the mends that the module's head lists."""

    def __init__(
        self, *, fleet: str, tls: BrokerTls, bind: tuple[str, int], on_denied: OnDenied = nobody_is_told
    ) -> None:
        # No plugins: they would come by name from a string; the two that matter are methods below.
        super().__init__(BrokerConfig(listeners={LISTENER: ListenerConfig(bind="{}:{}".format(*bind))}, plugins={}))
        self.connect_timeout_s = CONNECT_TIMEOUT_S
        self._fleet = fleet
        self._tls = tls
        self._bind = bind
        self._on_denied = on_denied
        self._context: ssl.SSLContext | None = None
        self._refused: frozenset[str] = frozenset()
        self._revoked: frozenset[str] = frozenset()
        self._running: dict[str, tuple[asyncio.Task[Any], asyncio.WriteTransport]] = {}
        self._connections: set[asyncio.Task[Any]] = set()

    def shut_out(self, names: Collection[str], serials: Collection[str] = ()) -> None:
        """Ends the connections of these identities and lets them in no more, nor these certificates."""
        self._refused, self._revoked = frozenset(names), frozenset(serials)
        for name in self._refused & set(self._running):
            self._running[name][1].abort()
        kept = self._retained_messages
        for topic in [topic for topic in kept if _owner(kept[topic].source_session) in self._refused]:
            del kept[topic]

    async def retain_message(
        self, source_session: Session | None, topic_name: str | None, data: bytes | None, qos: int | None = None
    ) -> None:
        """Keeps a message for those who subscribe later, unless its sender is refused, or has too much there."""
        who = _owner(source_session)
        if data and who is not None:
            before = sum(
                len(kept.data)
                for topic, kept in self._retained_messages.items()
                if topic != topic_name and _owner(kept.source_session) == who
            )
            if who in self._refused or before + len(data) > MAX_RETAINED_BYTES:
                self._on_denied(who, f"RETAIN of {len(data)} bytes at {topic_name!r}, beside {before} others")
                return
        await super().retain_message(source_session, topic_name, data, qos)

    def reload(self) -> None:
        """Shows the certificate that is in the files now to whoever connects from now on."""
        if self._context is not None:
            try:
                self._context.load_cert_chain(self._tls.cert, self._tls.key)
            except OSError as error:  # ssl.SSLError is one
                log.warning("the broker goes on with its old certificate: %s", error)

    async def shutdown(self) -> None:
        """Closes everything, sends no wills, and leaves no task behind."""
        for server in self._servers.values():
            server.instance.close()
        for _, transport in self._running.values():
            transport.abort()
        tasks = [*self._connections, *(task for task in (self._broadcast_task, self._session_monitor_task) if task)]
        # The deliveries first: amqtt's broadcast loop would wait for their acknowledgements.
        for task in (*self._tasks_queue, *tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sessions.clear()

    async def _start_listeners(self) -> None:
        self._context = context = _server_context(self._tls)
        context.sslobject_class = _telling(self._on_denied)
        host, port = self._bind
        try:
            instance = await asyncio.start_server(
                self._accept,
                host or None,
                port,
                ssl=context,
                ssl_handshake_timeout=self.connect_timeout_s,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
                reuse_address=True,
            )
        except OSError as error:
            raise port_error(host, port, error) from None
        self._servers[LISTENER] = Server(LISTENER, instance)

    async def start(self) -> None:
        """Listens; a failure keeps its own class instead of amqtt's."""
        try:
            await super().start()
        except AmqttBrokerError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, EdgeflError) else BrokerError(str(error)) from None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._connections.add(task)
        try:
            guarded = GuardedReader(reader, writer.transport, self.connect_timeout_s)
            await self._client_connected(LISTENER, guarded, ImpatientWriter(writer))
        except (OSError, asyncio.CancelledError):
            log.debug("connection ended", exc_info=True)
        finally:
            writer.transport.abort()
            self._connections.discard(task)
            await self._forget(task)

    async def _initialize_client_session(
        self, reader: ReaderAdapter, writer: WriterAdapter, remote_address: str, remote_port: int
    ) -> tuple[MendedHandler, Session]:
        identity, serial = _identity(writer.get_ssl_info())
        if not identity or identity in self._refused or serial in self._revoked:
            self._on_denied(
                identity, f"a connection from {remote_address}: it was removed, or renewed its certificate"
            )
            raise AMQTTError(f"{remote_address}:{remote_port}: {identity!r} is not let in")
        handler, session = await MendedHandler.init_from_connect(reader, writer, self.plugins_manager)
        await self._take_over(identity, writer.transport)
        session.client_id = session.username = identity
        session.clean_session = True
        session.parent = 0
        self._check_will(session)
        reader.timeout_s = session.keep_alive * KEEP_ALIVE_FACTOR or None
        session.keep_alive = 0  # amqtt's own timer only writes a line in its log
        return handler, session

    async def _take_over(self, identity: str, transport: asyncio.WriteTransport) -> None:
        """Ends the older connection of the same client, and its will with it, before the new one says anything."""
        while identity in self._running:
            old_task, old_transport = self._running[identity]
            old_transport.abort()
            done, _ = await asyncio.wait([old_task], timeout=CLOSE_TIMEOUT_S)
            if not done:
                old_task.cancel()
                await self._forget(old_task)
        task = asyncio.current_task()
        if task is not None:
            self._running[identity] = (task, transport)

    async def _forget(self, task: asyncio.Task[Any]) -> None:
        for identity in [name for name, (other, _) in self._running.items() if other is task]:
            del self._running[identity]
            await self._delete_session(identity)

    def _check_will(self, session: Session) -> None:
        """Drops a will that the client could not publish itself: amqtt sends wills unchecked."""
        if session.will_flag and not may_write(self._fleet, session.username, session.will_topic):
            session.will_flag = False

    async def _session_monitor(self) -> None:
        """Does nothing: sessions end with their connection, and amqtt's own sweep can hit a session just made."""

    async def _authenticate(self, session: Session, _: ListenerConfig) -> bool:
        return session.username is not None and session.username not in self._refused

    async def _topic_filtering(self, session: Session, topic: str, action: Action) -> bool:
        allowed = may_write if action == Action.PUBLISH else may_read
        who = session.username or ""
        is_allowed = who not in self._refused and allowed(self._fleet, who, topic)
        if not is_allowed and action != Action.RECEIVE:
            self._on_denied(who, f"{action.value.upper()} to {topic!r}")
        return is_allowed

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Session
    ) -> None:
        name_filter, qos = subscription
        if not any(owner is session for owner, _ in self._subscriptions.get(name_filter, ())):
            return
        handler = self._get_handler(session)
        for name, kept in list(self._retained_messages.items()):
            if not self._matches(name, name_filter) or not may_read(self._fleet, session.username or "", name):
                continue
            delivery = handler.mqtt_publish(kept.topic, kept.data, min(qos, kept.qos or 0), retain=True)
            self._tasks_queue.append(asyncio.ensure_future(delivery))


def _owner(session: Session | None) -> str | None:
    return None if session is None else session.username


def _server_context(tls: BrokerTls) -> ssl.SSLContext:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise BrokerError(
            f"the broker's TLS files cannot be used ({tls.ca}, {tls.cert}, {tls.key}): {error}"
        ) from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _telling(on_denied: OnDenied) -> type[ssl.SSLObject]:
    """Returns a class of TLS connections that tell of certificates that do not count: asyncio does not."""

    class TellingSSLObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLCertVerificationError:
                on_denied("", UNTRUSTED)
                raise
            except ssl.SSLError as error:
                if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
                    on_denied("", NAMELESS)
                raise

    return TellingSSLObject


def _identity(connection: ssl.SSLObject | None) -> tuple[str, str]:
    """Returns the common name of the client's certificate, or an empty string, and its serial in hexadecimal."""
    certificate: Any = (connection.getpeercert() if connection is not None else None) or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    serial = f"{int(certificate.get('serialNumber', '0'), 16):x}"
    return (str(names[0]) if len(names) == 1 else ""), serial
